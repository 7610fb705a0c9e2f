"""Q4_K and Q6_K: blocks of 256 whose scales are searched, so that the squared error is small.

The search is ggml's (`make_qkx2_quants`, `make_qx_quants`): several scales are tried for each part
of a block, each is refitted by least squares, and the best one is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ryzanstein.worker.checkpoints.gguf.small_blocks import Bytes, Numbers

_EPSILON = np.float32(1e-15)
_Whole = np.ndarray[Any, np.dtype[np.float32]]


def q4_k(blocks: Numbers) -> Bytes:
    """Packs 256 numbers as eight parts with a scale and an offset of 6 bits each."""
    parts = blocks.reshape(-1, 8, 32)
    steps, lowest = _steps_and_offsets(parts, 15)
    step, offset = (each.max(axis=-1, keepdims=True) / np.float32(63) for each in (steps, lowest))
    scales, offsets = _six_bits(steps, step), _six_bits(lowest, offset)
    step, offset = step.astype(np.float16), offset.astype(np.float16)
    exact = step.astype(np.float32) * scales
    shift = offset.astype(np.float32) * offsets
    values = np.rint((parts + shift[:, :, None]) * _reciprocal(exact)[:, :, None]).clip(0, 15)
    values = np.where(exact[:, :, None] == 0, 0, values).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = (values[:, :, 0] | values[:, :, 1] << np.uint8(4)).reshape(-1, 128)
    return np.concatenate([step.view(np.uint8), offset.view(np.uint8), _pack_scales(scales, offsets), packed], axis=-1)


def q6_k(blocks: Numbers) -> Bytes:
    """Packs 256 numbers as sixteen parts with a signed scale of 8 bits each."""
    parts = blocks.reshape(-1, 16, 16)
    steps = _signed_steps(parts, 32)
    place = np.abs(steps).argmax(axis=-1, keepdims=True)
    largest = np.take_along_axis(steps, place, axis=-1)
    inverse = np.where(np.abs(largest) < _EPSILON, np.float32(0), np.float32(-128) / largest)
    step = _reciprocal(inverse).astype(np.float16)
    scales = np.rint(inverse * steps).clip(-128, 127).astype(np.int8)
    exact = step.astype(np.float32) * scales.astype(np.float32)
    values = np.rint(parts * _reciprocal(exact)[:, :, None]).clip(-32, 31) + np.float32(32)
    packed = values.astype(np.uint8).reshape(-1, 2, 4, 32)
    lower = np.concatenate(
        [(packed[:, :, :2] & np.uint8(15)) | (packed[:, :, 2:] & np.uint8(15)) << np.uint8(4)], axis=-1
    ).reshape(-1, 128)
    upper = packed >> np.uint8(4)
    high = upper[:, :, 0] | upper[:, :, 1] << np.uint8(2) | upper[:, :, 2] << np.uint8(4) | upper[:, :, 3] << np.uint8(6)
    return np.concatenate([lower, high.reshape(-1, 64), scales.view(np.uint8), step.view(np.uint8)], axis=-1)


def _steps_and_offsets(parts: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Returns the steps and the offsets, none below 0, of parts [..., n] of values 0 to `most`.

    As in ggml, each try starts from the offset that is the best until then.
    """
    mean_square = np.sqrt((parts * parts).mean(axis=-1, keepdims=True))
    weights = mean_square + np.abs(parts)
    low, high = np.minimum(parts.min(axis=-1, keepdims=True), 0), parts.max(axis=-1, keepdims=True)
    span = high - low
    inverse = np.where(span > 0, np.float32(most) / span, np.float32(0))
    step, offset = _reciprocal(inverse), low
    values = np.rint(inverse * (parts - low)).clip(0, most)
    error = _error(parts, weights, values, step, offset)
    for index in range(21):
        tried = np.float32(-1 + 0.1 * index + most) * _reciprocal(np.where(span > 0, high - offset, np.float32(0)))
        values = np.rint(tried * (parts - offset)).clip(0, most)
        new_step, new_offset, solvable = _fitted(parts, weights, values)
        new_error = _error(parts, weights, values, new_step, new_offset)
        better = solvable & (new_error < error)
        step, offset = np.where(better, new_step, step), np.where(better, new_offset, offset)
        error = np.where(better, new_error, error)
    return step[..., 0], -offset[..., 0]


def _fitted(parts: Numbers, weights: Numbers, values: _Whole) -> tuple[Numbers, Numbers, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Returns the weighted least squares of parts = step * values + offset, with offset <= 0."""
    total, first, second = ((weights * each).sum(axis=-1, keepdims=True) for each in (np.float32(1), values, values * values))
    of_parts, mixed = ((weights * each).sum(axis=-1, keepdims=True) for each in (parts, values * parts))
    determinant = total * second - first * first
    solvable = determinant > 0
    safe = np.where(solvable, determinant, np.float32(1))
    step, offset = (total * mixed - of_parts * first) / safe, (second * of_parts - first * mixed) / safe
    without = offset > 0
    step = np.where(without, mixed * _reciprocal(second), step)
    return step, np.where(without, np.float32(0), offset), solvable


def _error(parts: Numbers, weights: Numbers, values: _Whole, step: Numbers, offset: Numbers) -> Numbers:
    difference = step * values + offset - parts
    found: Numbers = (weights * difference * difference).sum(axis=-1, keepdims=True)
    return found


def _signed_steps(parts: Numbers, half_range: int) -> Numbers:
    """Returns the steps of parts [..., n] of values -half_range to half_range - 1, weighted by squares."""
    weights = parts * parts
    place = np.abs(parts).argmax(axis=-1, keepdims=True)
    largest = np.take_along_axis(parts, place, axis=-1)
    empty = np.abs(largest) < _EPSILON
    safe = np.where(empty, np.float32(1), largest)
    step = best = np.zeros_like(largest)
    for tried in (0, *(index for index in range(-9, 10) if index != 0)):
        inverse = np.float32(-(half_range + 0.1 * tried)) / safe
        values = np.rint(inverse * parts).clip(-half_range, half_range - 1)
        mixed = (weights * parts * values).sum(axis=-1, keepdims=True)
        square = (weights * values * values).sum(axis=-1, keepdims=True)
        gain = mixed * mixed * _reciprocal(square)
        better = (square > 0) & (gain > best)
        step, best = np.where(better, mixed * _reciprocal(square), step), np.where(better, gain, best)
    found: Numbers = np.where(empty, np.float32(0), step)[..., 0]
    return found


def _six_bits(numbers: Numbers, step: Numbers) -> Numbers:
    """Returns numbers as multiples, 0 to 63, of a step."""
    found: Numbers = np.rint(numbers * _reciprocal(step)).clip(0, 63)
    return found


def _pack_scales(scales: Numbers, offsets: Numbers) -> Bytes:
    """Packs eight 6-bit scales and eight offsets in 12 bytes; `super_blocks.unpack_scales` reads them."""
    scale, offset = scales.astype(np.uint8), offsets.astype(np.uint8)
    low = scale[:, :4] | (scale[:, 4:] >> np.uint8(4)) << np.uint8(6)
    middle = offset[:, :4] | (offset[:, 4:] >> np.uint8(4)) << np.uint8(6)
    high = (scale[:, 4:] & np.uint8(15)) | (offset[:, 4:] & np.uint8(15)) << np.uint8(4)
    return np.concatenate([low, middle, high], axis=-1)


def _reciprocal(numbers: Numbers) -> Numbers:
    found: Numbers = np.where(numbers == 0, np.float32(0), np.float32(1) / np.where(numbers == 0, np.float32(1), numbers))
    return found
