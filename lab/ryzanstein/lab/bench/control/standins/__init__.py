"""Nodes and watchers without the rest of what they stand for: many of them in one process."""
