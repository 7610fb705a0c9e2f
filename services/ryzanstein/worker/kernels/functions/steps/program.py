"""Programs of a rank's layers (step.c): the structs of step.h, and the call that runs them."""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p, sizeof

from ryzanstein.worker.kernels.functions.attention import AttentionStruct
from ryzanstein.worker.kernels.functions.declaring import declared

PRODUCT, STORE, ATTEND, ADD, ACTIVATE, REDUCE, EMBED, ANGLES, HEAD, GREATEST, ADAPT, ADAPT_EMBED, ADAPT_HEAD = range(13)
"""What an op computes."""
SHORT = -1
WEIGHT_KINDS = {"floats": 0, "halves": 1, "unpacked": 2, "bytes": 3, "blocks": 4}
"""The ids of team.h."""


class OpStruct(Structure):
    """The struct Op."""

    _fields_ = (
        *((name, c_int32) for name in ("op", "layer", "place", "unused")),
        *((name, c_int64) for name in ("in_", "out", "residual")),
        *((name, c_int32) for name in ("kind", "type", "activation", "gated")),
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("num_inputs", "num_outputs", "stride", "block", "first")),
        ("norm", c_void_p),
        *((name, c_float) for name in ("eps", "offset", "factor")),
        *((name, c_int32) for name in ("group", "rotary")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "columns")),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        *((name, c_float) for name in ("clip", "cap")),
        *((name, c_int32) for name in ("clips_last", "half")),
        *((name, c_void_p) for name in ("pages", "cold", "sinks")),
    )


class AnglesStruct(Structure):
    """The struct StepAngles."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("num_rotated", c_int64), ("interleaved", c_int32), ("unused", c_int32))


class GroupStruct(Structure):
    """The struct StepGroup."""

    _fields_ = (("slots", c_void_p), ("asked", AttentionStruct))


class ProgramStruct(Structure):
    """The struct Program."""

    _fields_ = (
        ("ops", c_void_p),
        *((name, c_int64) for name in ("num_ops", "num_groups", "threads")),
        *((name, c_void_p) for name in ("arena", "memory")),
        *((name, c_int64) for name in ("memory_bytes", "needed_bytes", "most_inputs", "most_row_bytes")),
        *((name, c_float) for name in ("smallest", "unused")),
        ("meeting", c_void_p),
        ("reached", c_int64),
    )


class StepStruct(Structure):
    """The struct Step."""

    num_tokens: int
    num_wanted: int
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_wanted")),
        *((name, c_void_p) for name in ("ids", "positions", "last", "groups", "rotaries", "best", "tokens")),
        *((name, c_void_p) for name in ("segments", "last_segments", "index", "last_index")),
        *((name, c_int64) for name in ("num_segments", "num_adapted", "last_num_segments", "last_num_adapted", "low_floats")),
    )


_STRUCTS = (OpStruct, AnglesStruct, GroupStruct, ProgramStruct, StepStruct)


class ProgramFunctions:
    """The functions of step.c. Raises OSError if the library's structs have other sizes than ours."""

    def __init__(self, library: CDLL) -> None:
        bytes_of = declared(library, "step_struct_bytes", c_int, returns=c_int64)
        if any(bytes_of(which) != sizeof(struct) for which, struct in enumerate(_STRUCTS)):
            raise OSError("the kernels' library has other structs than this version")
        types = POINTER(ProgramStruct), POINTER(StepStruct), c_int64, c_int64, c_int
        self._run = declared(library, "run_step", *types, returns=c_int)

    def run(self, program: ProgramStruct, step: StepStruct, ops: tuple[int, int], again: bool) -> int:
        """Runs some ops. Returns 0; SHORT, having computed nothing, if the program needs more memory; or a status of a meeting.

        The op of the meeting is `reached` then. After AGAIN the ops from there on are to be run, with `again`.
        """
        status: int = self._run(byref(program), byref(step), *ops, again)
        return status
