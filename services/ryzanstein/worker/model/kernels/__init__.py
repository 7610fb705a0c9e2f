"""Kernels of our own for what torch can only do in many operators. Optional: without a C compiler the layers use torch."""
