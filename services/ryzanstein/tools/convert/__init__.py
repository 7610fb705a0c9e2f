"""Converts checkpoints to GGUF and back."""
