"""Judges constraints before they reach the ranks, in a process that can be killed.

`process` is the agent's side, `program` the process, `frames` what they send each other.
"""
