"""A node that answers from a script."""
