"""Environments that a model can act in. They exchange text only, no tokens."""
