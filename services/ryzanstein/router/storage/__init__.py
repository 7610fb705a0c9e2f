"""Shared by session stores and journals: SQLite's write-ahead log, Redis clients."""
