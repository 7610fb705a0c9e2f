"""The memory that the models of a node share."""
