"""Where pages are kept besides the cache: memory, disk, other nodes."""
