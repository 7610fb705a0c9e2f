"""The control plane at many nodes: a real orchestrator, real routers, and nodes that only seem to be."""
