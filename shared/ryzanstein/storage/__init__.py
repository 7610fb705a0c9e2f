"""Clients of storage that several services use."""
