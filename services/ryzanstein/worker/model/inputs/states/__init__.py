"""What layers that keep a state read of a step."""
