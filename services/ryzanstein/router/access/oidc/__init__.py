"""Tokens of an OpenID provider: its keys, and the callers that its tokens name."""
