"""compressed-tensors, as LLM Compressor writes it (https://github.com/vllm-project/compressed-tensors).

A packed module has `weight_packed` [O, I * bits / 32], words of successive inputs, levels offset to be
unsigned; `weight_shape`; `weight_scale` [O, G]; `weight_zero_point`, packed down its columns unless the
scales are of a tensor or of blocks. Others have `weight` in int8 or float8, and unpacked zero points.
Targets of a scheme are patterns of names, which are not evaluated: a module has the first scheme that its
tensors fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.found import FoundMatrix, modules_with
from ryzanstein.worker.checkpoints.quantized_files.levels import PackedAlong, Unpacked
from ryzanstein.worker.checkpoints.quantized_files.matrix import QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.scales import PackedZeros, SameZero, Scales, SignedZeros, Zeros
from ryzanstein.worker.checkpoints.quantized_files.schemes.bits import words_of
from ryzanstein.worker.checkpoints.quantized_files.schemes.compressed_schemes import Scheme, schemes
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import SCALE_DTYPES, StoredTensors
from ryzanstein.worker.refusal import CheckpointError

UNREAD = tuple(f".{of}_{what}" for of in ("input", "output", "q", "k", "v") for what in ("scale", "zero_point"))
"""What only rounds activations or keys and values."""
_UNPACKED = {"I8": True, "F8_E4M3": False}


def find(tensors: StoredTensors, settings: Values) -> Iterator[FoundMatrix]:
    """Yields the matrices of a checkpoint. Raises CheckpointError."""
    known = schemes(settings)
    packed = [scheme for scheme in known if scheme.packed]
    _refuse_sparse(settings)
    for module in modules_with(tensors, ".weight_packed"):
        found = partial(_packed, tensors, module, _stated_shape(tensors, module))
        yield _first_that_fits(tensors, f"{module}.weight_packed", packed, found)
    for module in modules_with(tensors, ".weight"):
        whole_numbers = _UNPACKED.get(tensors.entries[f"{module}.weight"].dtype)
        if whole_numbers is not None:
            fitting = [scheme for scheme in known if not scheme.packed and scheme.whole_numbers == whole_numbers]
            yield _first_that_fits(tensors, f"{module}.weight", fitting, partial(_unpacked, tensors, module))


def _refuse_sparse(settings: Values) -> None:
    sparse = settings.table("sparsity_config")
    layout = sparse.optional("format")
    if layout not in (None, "dense"):
        raise sparse.error("format", "is not supported: sparse weights are not read")
    if settings.optional("transform_config"):
        raise settings.error("transform_config", "is not supported: inputs are not transformed")


def _first_that_fits(
    tensors: StoredTensors, levels: str, fitting: Sequence[Scheme], found: Callable[[Scheme], FoundMatrix]
) -> FoundMatrix:
    refusal = tensors.error(levels, "fits none of quantization_config.config_groups")
    for scheme in fitting:
        try:
            return found(scheme)
        except CheckpointError as error:
            refusal = error
    raise refusal


@dataclass(frozen=True, slots=True)
class _Stored:
    """The levels and zero points of a matrix, and the tensors that have them."""

    shape: tuple[int, int]
    levels: PackedAlong | Unpacked
    zeros: Zeros | None
    parts: frozenset[str]


def _stated_shape(tensors: StoredTensors, module: str) -> tuple[int, int]:
    name = f"{module}.weight_shape"
    tensors.expect(name, ("I64", "I32"), (2,))
    num_outputs, num_inputs = tensors.whole(name).tolist()
    return num_outputs, num_inputs


def _packed(tensors: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme) -> FoundMatrix:
    levels, whole, bits = f"{module}.weight_packed", f"{module}.weight_shape", scheme.bits
    num_outputs, num_words = tensors.matrix(levels, ("I32",))
    if shape[0] != num_outputs or shape[1] < 1 or words_of(shape[1], bits) != num_words:
        raise tensors.error(whole, f"is {list(shape)}, with levels of {bits} bits in {[num_outputs, num_words]} words")
    zeros, parts = _packed_zeros(tensors, module, scheme, shape)
    return _found(tensors, module, scheme, _Stored(shape, PackedAlong(tensors, levels, bits), zeros, parts | {levels, whole}))


def _packed_zeros(tensors: StoredTensors, module: str, scheme: Scheme, shape: tuple[int, int]) -> tuple[Zeros, frozenset[str]]:
    offset, name = 1 << (scheme.bits - 1), f"{module}.weight_zero_point"
    if scheme.symmetric:
        if name in tensors.entries:
            raise tensors.error(name, "does not fit a scheme of quantization_config.config_groups that is symmetric")
        return SameZero(offset), frozenset()
    if scheme.rows != 1:
        tensors.expect(name, ("I8",), *_scale_shapes(scheme, shape))
        return SignedZeros(tensors, name, offset, scheme.block(shape)[0]), frozenset({name})
    num_groups = scheme.scales_shape(shape)[1]
    tensors.expect(name, ("I32",), (words_of(shape[0], scheme.bits), num_groups))
    return PackedZeros(tensors, name, scheme.bits), frozenset({name})


def _unpacked(tensors: StoredTensors, module: str, scheme: Scheme) -> FoundMatrix:
    levels, name = f"{module}.weight", f"{module}.weight_zero_point"
    shape = tensors.matrix(levels, ("I8" if scheme.whole_numbers else "F8_E4M3",))
    zeros: Zeros | None = SameZero(128) if scheme.whole_numbers else None
    parts = {levels}
    if not scheme.symmetric or (name in tensors.entries and scheme.whole_numbers):
        tensors.expect(name, ("I8",), *_scale_shapes(scheme, shape))
        zeros, parts = SignedZeros(tensors, name, 128, scheme.block(shape)[0]), {levels, name}
    return _found(tensors, module, scheme, _Stored(shape, Unpacked(tensors, levels), zeros, frozenset(parts)))


def _scale_shapes(scheme: Scheme, shape: tuple[int, int]) -> list[tuple[int, ...]]:
    return [(), (1,), (1, 1)] if scheme.rows is None else [scheme.scales_shape(shape)]


def _found(tensors: StoredTensors, module: str, scheme: Scheme, stored: _Stored) -> FoundMatrix:
    scales, index = f"{module}.weight_scale", f"{module}.weight_g_idx"
    tensors.expect(scales, SCALE_DTYPES, *_scale_shapes(scheme, stored.shape))
    has_index = index in tensors.entries
    if has_index:
        tensors.expect(index, ("I32", "I64"), (stored.shape[1],))
    num_rows, num_columns = scheme.block(stored.shape)
    matrix = QuantizedMatrix(
        tensors,
        stored.levels.name,
        stored.shape,
        stored.levels,
        Scales(tensors, scales, row_block=num_rows),
        stored.zeros,
        num_columns,
        scheme.kept,
        index if has_index else None,
    )
    return FoundMatrix(f"{module}.weight", matrix, stored.parts | {scales, *((index,) if has_index else ())})
