"""What a service does with its own process and its machine."""
