"""Paths and private files."""
