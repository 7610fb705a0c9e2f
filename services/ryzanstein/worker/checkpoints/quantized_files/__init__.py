"""Checkpoints that others quantized: what `quantization_config` and the stored tensors say, as floats or as blocks."""
