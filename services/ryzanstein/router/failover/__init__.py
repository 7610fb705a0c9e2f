"""Runs a generation on nodes: attempts, their placement, patience with them, hedges."""
