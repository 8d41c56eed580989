"""Start and stop Ray on several nodes, and write the scripts that cluster managers run."""


class ClusterError(RuntimeError):
    """A node cannot be started, joined or checked. The message has the cause and the remedy."""
