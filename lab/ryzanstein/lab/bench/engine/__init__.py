"""Benchmarks of this machine: `ryzanstein bench`. No service imports it."""
