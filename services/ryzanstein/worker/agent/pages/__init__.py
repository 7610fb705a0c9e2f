"""Pages of KV caches that move: to the backup, to memory and disk, and back before a prompt is computed."""
