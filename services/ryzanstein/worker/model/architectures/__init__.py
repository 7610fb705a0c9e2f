"""Decoders as data: each architecture is a table of choices and a map of weight names."""
