"""verlite: reinforcement learning for language models, small enough to read and proven on a CPU."""

__version__ = "0.1.0"
