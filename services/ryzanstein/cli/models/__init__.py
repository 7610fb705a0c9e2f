"""`ryzanstein models`: fetches models, lists and removes what was fetched."""
