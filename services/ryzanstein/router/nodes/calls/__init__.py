"""Calls to a node beside its stream: tokens, texts, vectors. A call leaves no state on the node."""
