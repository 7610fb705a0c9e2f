"""Measures collectives among ranks."""
