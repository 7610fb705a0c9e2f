"""Constraints on answers: schemas to grammars, grammars to token masks.

The agent's grammar process checks here what rank 0 compiles again. llguidance (`guidance`) is imported only by
the functions that need it.
"""
