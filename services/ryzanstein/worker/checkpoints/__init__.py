"""Reads checkpoints of every file format. Knows nothing of a model's layers."""
