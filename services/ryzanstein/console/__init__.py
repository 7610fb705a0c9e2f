"""`ryzanstein console`: a page for people. A process of its own, and a client of the cluster like any other."""
