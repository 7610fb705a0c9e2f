"""The node's ranks: spawned, supervised and, when one dies or stalls, restarted together."""
