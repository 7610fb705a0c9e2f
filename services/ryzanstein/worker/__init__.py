"""A node: an agent (gRPC, text, supervision) and its ranks (engine and model), one process each."""
