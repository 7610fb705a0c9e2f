"""The node's ranks: started, supervised and, when one dies or stalls, restarted together."""
