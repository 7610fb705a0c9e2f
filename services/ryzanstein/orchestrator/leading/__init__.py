"""Which of the orchestrators acts, and how the others, nodes and routers know."""
