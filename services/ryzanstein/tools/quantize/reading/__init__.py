"""Reads the model that is quantized, layer by layer."""
