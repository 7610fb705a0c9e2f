"""The record of what operators do: who did what, to what, and how it ended."""
