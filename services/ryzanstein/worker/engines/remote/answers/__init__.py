"""What a server computes of a choice, checked token by token."""
