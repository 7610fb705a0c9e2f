"""The cluster's nodes: the orchestrator's watch, and the last view on disk."""
