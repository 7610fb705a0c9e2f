"""`ryzanstein status --watch`: a cluster as it changes, at a terminal or as lines.

Everything but the room `screen` is plain Python without a terminal.
"""
