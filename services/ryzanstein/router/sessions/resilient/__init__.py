"""A session store that goes on in memory while the one behind it fails."""
