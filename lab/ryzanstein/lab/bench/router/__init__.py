"""`ryzanstein bench router`: what the router itself costs.

It is compared with proxies in front of the same node.
"""
