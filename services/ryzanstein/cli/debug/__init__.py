"""`ryzanstein debug`: where a request is that does not end, and what everything else does."""
