"""Simulated hosts: clocks, event loops, processes, networks."""
