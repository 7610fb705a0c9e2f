"""The parts of a decoder. Each owns the slicing and loading of its weights, so that a decoder never mentions a rank."""
