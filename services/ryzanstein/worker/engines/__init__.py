"""Engines that are not ours: what runs a model in place of our ranks."""
