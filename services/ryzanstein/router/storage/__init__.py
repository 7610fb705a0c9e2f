"""What session stores and journals share: SQLite's write-ahead log, Redis clients."""
