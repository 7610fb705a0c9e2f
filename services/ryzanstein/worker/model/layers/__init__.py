"""The parts of a decoder. Each slices and loads its own weights: the decoder handles no ranks."""
