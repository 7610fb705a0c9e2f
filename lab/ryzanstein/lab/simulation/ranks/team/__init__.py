"""Simulated ranks of one node, and their steps."""
