"""Decides what runs in each step. Plain Python: neither torch nor grpc is imported below this package."""
