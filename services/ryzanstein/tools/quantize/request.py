"""What is asked for: the options of `ryzanstein quantize`, and the schemes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from ryzanstein.tools.quantize.methods.grids import Grid, group_for
from ryzanstein.tools.quantize.reading.layouts import LayoutScheme

Method = Literal["rtn", "gptq", "awq", "int8", "ternary", "auto"]
METHODS: tuple[Method, ...] = get_args(Method)
CALIBRATED: tuple[Method, ...] = ("gptq", "awq", "auto")
WORST = 0.02
"""The largest relative loss of perplexity with which a model is served."""
_SMALL = 10**9
_DEFAULTS: Mapping[Method, float] = {"auto": 0.01, "ternary": WORST}


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on the relative loss of perplexity, and perhaps one on the bytes of the weights."""

    loss: float
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """The options. `group` None: 32 for a model below a billion parameters, 128 for others."""

    method: Method
    bits: int = 4
    group: int | None = None
    zero_points: bool = False
    act_order: bool = False
    calibration: tuple[Path, ...] = ()
    num_tokens: int = 32768
    budget: Budget | None = None

    @property
    def limit(self) -> Budget | None:
        """The bounds that the measured loss must keep: the given ones, or the method's own."""
        own = _DEFAULTS.get(self.method)
        return self.budget or (None if own is None else Budget(own))

    def group_of(self, num_parameters: int) -> int:
        return self.group or (32 if num_parameters < _SMALL else 128)


@dataclass(frozen=True, slots=True)
class Schemes:
    """The scheme that a request means for a matrix."""

    request: Request
    group: int

    def grid(self, num_inputs: int, dtype: torch.dtype, bits: int | None = None) -> Grid | None:
        """Returns the grid of weights alone, None if no group divides the inputs."""
        group = group_for(num_inputs, self.group)
        if group is None:
            return None
        bits = bits or self.request.bits
        return Grid(bits, group, self.request.zero_points and bits < 8, scale_dtype(dtype))

    def scheme(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> LayoutScheme | None:
        """Returns the request's scheme, None if the matrix stays in floats."""
        if self.request.method == "int8":
            return LayoutScheme(Grid(8, None, False, scale_dtype(dtype)), rounds_inputs=True)
        if self.request.method == "ternary":
            whole = num_outputs % 4 == 0
            return LayoutScheme(Grid(2, None, False, torch.float32), rounds_inputs=True, ternary=True) if whole else None
        grid = self.grid(num_inputs, dtype)
        return None if grid is None else LayoutScheme(grid)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of scales: half as wide as float32, whose other bits levels would not notice."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16
