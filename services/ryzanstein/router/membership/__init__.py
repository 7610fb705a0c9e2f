"""Which nodes the cluster has: the orchestrator's watch, and the last view on disk."""
