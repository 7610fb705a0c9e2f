"""What the agent asks of whatever runs a model, and the supervision that restarts it."""
