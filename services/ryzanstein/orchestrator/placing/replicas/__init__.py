"""What becomes of a model on a node: whether it failed there, or comes no further."""
