"""What compressed keys and values cost and gain: `ryzanstein bench kv`."""
