"""One module for each peer, run with the Python of the peer's own environment; none knows the rest of the project."""
