"""How each quantization scheme stores a matrix."""
