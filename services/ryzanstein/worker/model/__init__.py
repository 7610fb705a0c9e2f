"""Computes a step: tensors, collectives, weights. Importing this package does not import torch.

Nothing here decides what runs.
"""
