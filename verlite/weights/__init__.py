"""Weights between the trainer and the generation engines."""
