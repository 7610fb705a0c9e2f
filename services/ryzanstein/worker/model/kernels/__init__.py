"""Our own kernels for operations that take torch many operators.

They are optional: where they can neither be compiled nor be taken from the wheel, the layers use
torch.
"""
