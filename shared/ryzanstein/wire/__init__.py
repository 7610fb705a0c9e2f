"""Converts domain values to and from `ryzanstein.v1`. The only package that depends on both.

`*_from_wire` raise INVALID_ARGUMENT, which names the field; `*_to_wire` cannot fail. Enums are
open: a number that only a newer peer knows becomes UNSPECIFIED, and is refused only where
UNSPECIFIED is refused: in the role of a client's message, and in a client's choice of tools.
"""
