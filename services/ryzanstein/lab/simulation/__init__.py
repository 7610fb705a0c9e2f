"""A deterministic simulation of a whole cluster in one process: real services, virtual time, an in-memory network, one seed."""
