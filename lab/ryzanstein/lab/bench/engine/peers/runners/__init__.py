"""One module per peer, run with the Python of the peer's environment.

None imports the rest of the project.
"""
