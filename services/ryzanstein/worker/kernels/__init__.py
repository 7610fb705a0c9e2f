"""Our own kernels for operations that take torch many operators.

They are optional: where they can neither be compiled nor be taken from the wheel, the layers use
torch.
"""

REVISION = 2
"""Raised when a kernel's results change in any bit: nodes of two revisions compute other tokens.

2: attention sums parts of 256 keys.
"""
