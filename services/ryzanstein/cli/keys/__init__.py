"""`ryzanstein keys`: makes, lists, revokes and checks API keys."""
