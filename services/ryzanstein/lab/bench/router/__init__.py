"""`ryzanstein bench router`: what the router itself costs, beside proxies in front of the same node."""
