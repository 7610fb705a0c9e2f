"""A session store that continues in memory while the store behind it fails."""
