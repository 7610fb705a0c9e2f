"""A router of several processes: what they share, and who watches them."""
