"""Many adapters on a cluster: what they cost its memory, its messages and its first tokens, and that every answer is right."""
