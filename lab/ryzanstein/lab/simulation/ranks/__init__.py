"""Ranks that compute by script."""
