"""Runs a generation on nodes: attempts, placement, patience, hedges."""
