"""Which node runs which model. Plain logic."""
