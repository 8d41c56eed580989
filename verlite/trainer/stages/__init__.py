"""The stages of one training step, by phase.

A stage takes the run and the batch, and returns the batch with the fields that it adds. Its metrics
go to `run.metrics`.
"""
