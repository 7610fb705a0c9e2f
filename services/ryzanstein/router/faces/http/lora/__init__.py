"""Adapters by vLLM's routes, for operators whose tools know those."""
