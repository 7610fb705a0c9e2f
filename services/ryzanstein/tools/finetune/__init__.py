"""Trains adapters for a model on a CPU, on the very weights that are served."""
