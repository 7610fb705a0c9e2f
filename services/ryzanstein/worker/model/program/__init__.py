"""A step as one native call: which ops it has, and how they run."""
