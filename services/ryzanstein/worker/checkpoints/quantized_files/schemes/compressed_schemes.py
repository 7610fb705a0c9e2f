"""The schemes that the `config_groups` of compressed-tensors describe. Which of them a module has its tensors say."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.matrix import Kept
from ryzanstein.worker.checkpoints.quantized_files.schemes.bits import WIDTHS
from ryzanstein.worker.checkpoints.quantized_files.settings import one_of
from ryzanstein.worker.refusal import excerpt

PACKED = "pack-quantized"
UNPACKED = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = (PACKED, *UNPACKED)
_MANY = ("mixed-precision",)
_STRATEGIES = ("tensor", "channel", "group", "block")
_MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix is stored: a scale for each block of `rows` by `columns`; None is all of them."""

    packed: bool
    whole_numbers: bool
    bits: int
    symmetric: bool
    rows: int | None
    columns: int | None

    @property
    def kept(self) -> Kept:
        if not self.whole_numbers:
            return None
        return "4 bits" if self.packed and self.bits < 8 else "8 bits"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the rows and columns that have one scale, for a matrix of this shape."""
        return min(self.rows or shape[0], shape[0]), min(self.columns or shape[1], shape[1])

    def scales_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = self.block(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)


def schemes(settings: Values) -> list[Scheme]:
    """Returns the different schemes, in their order. Raises CheckpointError for one that is not read."""
    groups = settings.table("config_groups")
    if not 0 < len(groups.config) <= _MAX_GROUPS:
        raise settings.error("config_groups", f"must have 1 to {_MAX_GROUPS} entries, got {len(groups.config)}")
    whole = one_of(settings, "format", (*_FORMATS, *_MANY))
    stored_as = None if whole in _MANY else whole
    return list(dict.fromkeys(_scheme(groups.table(name), stored_as) for name in groups.config))


def _scheme(group: Values, stored_as: str | None) -> Scheme:
    layout = one_of(group, "format", _FORMATS, stored_as)
    weights = group.table("weights")
    whole_numbers = one_of(weights, "type", ("int", "float"), "int") == "int"
    bits = one_of(weights, "num_bits", WIDTHS if whole_numbers else (8,), 8)
    if weights.optional("dynamic"):
        raise weights.error("dynamic", f"{excerpt(weights.optional('dynamic'))} is not supported for weights")
    rows, columns = _block(weights)
    symmetric = one_of(weights, "symmetric", (True, False), True)
    return Scheme(layout == PACKED, whole_numbers, bits, symmetric, rows, columns)


def _block(weights: Values) -> tuple[int | None, int | None]:
    group_size = weights.optional("group_size")
    implied = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = one_of(weights, "strategy", _STRATEGIES, implied)
    if strategy == "block":
        sizes = weights.indices("block_structure")
        if len(sizes) != 2 or not all(0 < size < 2**31 for size in sizes):
            raise weights.error("block_structure", f"must be two whole numbers above 0, got {list(sizes)[:4]}")
        return sizes[0], sizes[1]
    if strategy == "group" and group_size != -1:
        return 1, weights.count("group_size")
    return (None if strategy == "tensor" else 1), None
