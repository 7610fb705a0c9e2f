"""Writes random checkpoints of a given shape."""
