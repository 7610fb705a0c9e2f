"""Session stores: in memory, in SQLite, in Redis."""
