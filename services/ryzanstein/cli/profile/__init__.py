"""`ryzanstein profile`."""
