"""`ryzanstein demo`: two nodes, a conversation, a node killed during an answer."""
