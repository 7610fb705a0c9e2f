"""A step of all layers in C, and where its ranks meet."""
