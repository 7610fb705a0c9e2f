"""Computes a step: tensors, collectives, weights. Nothing here decides what runs; importing this package imports no torch."""
