"""Compares two documents of results."""
