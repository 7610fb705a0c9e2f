"""A cluster on its hosts, under load."""
