"""What the orchestrator knows: nodes, models, and what is stored of them."""
