"""Text of one model on a node: from messages to token ids, and from token ids back to text as it becomes certain."""
