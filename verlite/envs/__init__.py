"""The worlds that a model can act in: text in, text out."""
