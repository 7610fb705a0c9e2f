"""What measures, strikes and simulates the services; no service imports it."""
