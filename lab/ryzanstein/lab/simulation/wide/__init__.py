"""Wide plans: many nodes without ranks, which speak the real protocols, and what must hold of all of them together."""
