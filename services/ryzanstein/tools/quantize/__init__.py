"""Writes quantized checkpoints: `ryzanstein quantize SRC DST`.

A model is quantized layer by layer, so that it need not fit into memory. What is written is read by
transformers with the library compressed-tensors, and by us.
"""
