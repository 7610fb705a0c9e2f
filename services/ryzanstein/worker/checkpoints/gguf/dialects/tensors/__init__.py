"""Which tensors of a file are those of which of a checkpoint."""
