"""The training engine: FSDP2, LoRA, log-probs, updates and checkpoints of one model."""


class NonFiniteError(RuntimeError):
    """Loss, gradients or weights are NaN or infinite."""
