"""Errors of training engines. torch is not imported here."""


class NonFiniteError(RuntimeError):
    """Loss, gradients or weights are NaN or infinite."""
