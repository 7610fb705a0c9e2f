"""Decoders as data: an architecture is a table of choices and a map of weight names."""
