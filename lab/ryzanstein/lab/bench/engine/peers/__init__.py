"""Alternatives that a user could run: `ryzanstein bench engine --peers`.

They are measured on the same checkpoint and prompts.
"""
