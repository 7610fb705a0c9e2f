"""Benchmarks of the engine and of the router, each beside its peers."""
