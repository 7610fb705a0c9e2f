"""Recorded spans: in files, and counted."""
