"""Measures what this machine does: `ryzanstein bench`. No service imports it."""
