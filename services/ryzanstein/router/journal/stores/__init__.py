"""Journals in SQLite and in Redis."""
