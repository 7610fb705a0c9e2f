"""How a function of a loaded library gets its C types."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_int64, c_void_p
from typing import Any

Function = Callable[..., Any]


def declared(library: CDLL, name: str, *types: Any, returns: type[Any] | None = None) -> Function:
    """Returns a function with the types of its arguments and of its result.

    Raises AttributeError if the library does not have it.
    """
    function = getattr(library, name)
    function.argtypes, function.restype = types, returns
    found: Function = function
    return found


def pointers(count: int) -> tuple[type[Any], ...]:
    return (c_void_p,) * count


def integers(count: int) -> tuple[type[Any], ...]:
    return (c_int64,) * count
