"""The error of `verlite cluster`."""


class ClusterError(RuntimeError):
    """A node cannot be started, joined or checked. The message has the cause and the remedy."""
