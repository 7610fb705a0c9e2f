"""Our own kernels for operations that take torch many operators.

They are optional: without a C compiler the layers use torch.
"""
