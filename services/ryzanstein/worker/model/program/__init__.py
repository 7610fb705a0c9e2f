"""A step's layers as one native call: which ops they are, and how they run."""
