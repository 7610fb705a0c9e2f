"""Adapters of a node's model: which are registered, and which of them are in the memory of its ranks."""
