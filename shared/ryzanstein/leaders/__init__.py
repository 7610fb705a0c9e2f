"""Which orchestrator leads, as nodes, routers and tools know it."""
