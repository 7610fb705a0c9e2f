"""Clients of a cluster, over every face, that check the index of each token."""
