"""Engines that are not ours: what computes tokens in place of our ranks."""
