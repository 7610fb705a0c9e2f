"""Load for the router, and what it measures."""
