"""A deterministic simulation of a whole cluster in one process.

It runs the real services in virtual time, with an in-memory network and one seed.
"""
