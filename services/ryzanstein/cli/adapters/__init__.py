"""`ryzanstein adapters`: which adapters the nodes answer with."""
