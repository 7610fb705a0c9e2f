"""What a user could run instead, measured on the same checkpoint and prompts: `ryzanstein bench engine --peers`."""
