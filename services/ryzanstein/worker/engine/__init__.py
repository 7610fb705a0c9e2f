"""Decides what runs in each step. Plain Python: this package imports neither torch nor grpc."""
