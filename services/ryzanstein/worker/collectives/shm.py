"""Collectives over one shared memory segment, for ranks on the CPUs of one machine.

C code sums float32 numbers in the same protocol, once it is given (`use`); Python does the rest, and is the reference.

Each rank writes its operand into its own slot and increments its arrival flag. When all flags have
arrived, every rank reads all slots. Operations use the two slots of a rank alternately, so one
barrier is enough: a rank that writes slot 0 again has passed the barrier of the operation on slot 1
in between, and no rank enters that barrier before it has read slot 0.

Publication relies on x86's total store order: data becomes visible before the flag that is stored
after it. Python has no fence for machines with weaker order, so they are refused and use gloo.
"""

from __future__ import annotations

import mmap
import platform
from ctypes import addressof, c_char, sizeof
from functools import lru_cache

import torch
from torch import Tensor

from ryzanstein.worker.collectives import CollectiveProgress
from ryzanstein.worker.collectives.meeting import AGAIN, Meeting, NativeMeeting, awaited, failure, gave_up, out_of_step
from ryzanstein.worker.collectives.segment import FLAG_STRIDE_BYTES, FLAGS_BYTES, SLOT_BYTES, segment_bytes, slot_offset
from ryzanstein.worker.collectives.waiting import WaitPolicy, await_flag

_ORDERED_MACHINES = ("x86_64", "AMD64")
_SPLIT_BYTES = 64 * 1024  # from here on, with over two ranks, summing parts pays off
_STRIDE = FLAG_STRIDE_BYTES // 8
_KINDS = {"all_reduce": 1, "gather": 2, "broadcast": 3}
# More arrivals than any group has. A flag at or past the next multiple means that its rank left the
# step.
_EPOCH = 1 << 40


class ShmCollectives:
    """One rank's end of the segment behind `segment_fd`. The caller still owns the descriptor."""

    def __init__(self, segment_fd: int, rank: int, size: int, progress: CollectiveProgress, patience: WaitPolicy) -> None:
        if platform.machine() not in _ORDERED_MACHINES:
            raise OSError(f"shared-memory collectives require the store order of x86, not {platform.machine()}: use gloo")
        self._rank, self._size = rank, size
        self._progress = progress
        self._patience = patience
        self._map = mmap.mmap(segment_fd, segment_bytes(size))
        self._flags = memoryview(self._map)[:FLAGS_BYTES].cast("Q")
        self._meeting = self._new_meeting()
        self._meeting_at = addressof(self._meeting)
        self._native: NativeMeeting | None = None
        self._native_reports = progress.address is not None
        self._slots = lru_cache(maxsize=512)(self._map_slots)

    def _new_meeting(self) -> Meeting:
        patience, start = self._patience, addressof(c_char.from_buffer(self._map))
        return Meeting(
            flags=start,
            slots=start + FLAGS_BYTES,
            board=self._progress.address,
            rank=self._rank,
            size=self._size,
            spin_ns=round(patience.spin_s * 1e9),
            yield_ns=round(patience.yield_s * 1e9),
            deadline_ns=round(patience.deadline_s * 1e9),
            epoch_end=_EPOCH,
        )

    @property
    def meeting(self) -> Meeting | None:
        return None if self._native is None else self._meeting

    def use(self, native: NativeMeeting | None) -> None:
        assert native is None or native.state_bytes == sizeof(Meeting), "the struct Meeting of meeting.h is another"
        self._native = native

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._native is not None and x.dtype is torch.float32 and x.is_contiguous():
            return self._all_reduce_in_c(self._native, x)
        self._progress.begin("all_reduce", x.nbytes)
        flat_N = x.view(-1)
        add_up = self._add_up_parts if self._size > 2 and x.nbytes >= _SPLIT_BYTES else self._add_up
        for chunk_N in _chunks(flat_N):
            add_up(chunk_N)
        self._progress.end()
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self._progress.begin("all_gather", x.nbytes)
        gathered = self._gather(x.contiguous(), dim, keep=True)
        assert gathered is not None
        self._progress.end()
        return gathered

    def gather_to_root(self, x: Tensor, dim: int = -1) -> Tensor | None:
        self._progress.begin("gather_to_root", x.nbytes)
        gathered = self._gather(x.contiguous(), dim, keep=self._rank == 0)
        self._progress.end()
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        self._progress.begin("broadcast", x.nbytes)
        for chunk_N in _chunks(x.view(-1)):
            slots = self._turn(chunk_N)
            if self._rank == 0:
                slots[0].copy_(chunk_N)
            self._barrier("broadcast", chunk_N)
            if self._rank > 0:
                chunk_N.copy_(slots[0])
        self._progress.end()
        return x

    def rejoin(self) -> None:
        """Waits for all ranks in the next epoch. After that no rank reads an old slot."""
        meeting = self._meeting
        self._progress.begin("rejoin", 0)
        meeting.arrivals = meeting.epoch_end
        meeting.epoch_end += _EPOCH
        meeting.parity = 0
        self._flags[self._rank * _STRIDE] = meeting.arrivals
        for peer in range(self._size):
            self._await(peer, "rejoin")
        self._progress.end()
        self._progress.rejoined()

    def close(self) -> None:
        """Releases the flags. The last tensor that refers to the mapping releases the mapping."""
        self._native = None
        self._slots.cache_clear()
        self._flags.release()

    def _all_reduce_in_c(self, native: NativeMeeting, x: Tensor) -> Tensor:
        if not self._native_reports:
            self._progress.begin("all_reduce", x.nbytes)
        meeting, values, count = self._meeting_at, x.data_ptr(), x.numel()
        status = native.all_reduce(meeting, values, count, 0)
        while status == AGAIN:
            status = native.all_reduce(meeting, values, count, 1)
        if status:
            raise failure(self._meeting, status)
        if not self._native_reports:
            self._progress.end()
        return x

    def _add_up(self, x_N: Tensor) -> None:
        """Sums everything on every rank, in rank order."""
        slots = self._turn(x_N)
        slots[self._rank].copy_(x_N)
        self._barrier("all_reduce", x_N)
        _sum_in_order(slots, x_N)

    def _add_up_parts(self, x_N: Tensor) -> None:
        """Sums one part on each rank, then exchanges the sums.

        A sum overwrites the operand in the rank's own slot: no other rank reads that part of the
        operand.
        """
        slots = self._turn(x_N)
        slots[self._rank].copy_(x_N)
        self._barrier("all_reduce", x_N)
        parts = [slot.tensor_split(self._size) for slot in slots]
        mine = self._rank
        _sum_in_order([part[mine] for part in parts], x_N.tensor_split(self._size)[mine])
        parts[mine][mine].copy_(x_N.tensor_split(self._size)[mine])
        self._barrier("all_reduce", x_N)
        for rank, part_N in enumerate(x_N.tensor_split(self._size)):
            if rank != mine:
                part_N.copy_(parts[rank][rank])

    def _gather(self, x: Tensor, dim: int, keep: bool) -> Tensor | None:
        out_RN = x.new_empty((self._size, x.numel())) if keep else None
        start = 0
        for chunk_N in _chunks(x.view(-1)):
            slots = self._turn(chunk_N)
            slots[self._rank].copy_(chunk_N)
            self._barrier("gather", chunk_N)
            if out_RN is not None:
                torch.stack(slots, out=out_RN[:, start : start + chunk_N.numel()])
            start += chunk_N.numel()
        return None if out_RN is None else torch.cat([row_N.view(x.shape) for row_N in out_RN], dim)

    def _turn(self, x_N: Tensor) -> tuple[Tensor, ...]:
        """Returns every rank's slot for this operation, as tensors like `x_N`."""
        self._meeting.parity ^= 1
        return self._slots(x_N.dtype, x_N.numel(), self._meeting.parity)

    def _map_slots(self, dtype: torch.dtype, count: int, parity: int) -> tuple[Tensor, ...]:
        offsets = (slot_offset(rank, parity) for rank in range(self._size))
        return tuple(torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset) for offset in offsets)

    def _barrier(self, op: str, x_N: Tensor) -> None:
        """Waits until all ranks have arrived, and checks that they are in the same operation.

        With its arrival every rank publishes its operation, in alternate places at even and odd
        arrivals, like the slots. A rank that publishes another operation has skipped one: from then
        on unrelated numbers would be combined.
        """
        arrivals, epoch_end = self._meeting.arrivals + 1, self._meeting.epoch_end
        self._meeting.arrivals = arrivals
        mine, reported_at = self._rank * _STRIDE, 1 + (arrivals & 1)
        self._flags[mine + reported_at] = message = x_N.nbytes << 2 | _KINDS[op]
        self._flags[mine] = arrivals
        for peer in range(self._size):
            theirs = peer * _STRIDE
            if self._flags[theirs] < arrivals:
                self._await(peer, op)
            if self._flags[theirs] >= epoch_end:
                raise gave_up(op, peer)
            if self._flags[theirs + reported_at] != message:
                raise out_of_step(op, x_N.nbytes, self._rank, peer)

    def _await(self, peer: int, op: str) -> None:
        arrivals, waiting = self._meeting.arrivals, awaited(op, self._rank, peer)
        await_flag(self._flags, peer * _STRIDE, arrivals, self._patience, waiting)


def _chunks(x_N: Tensor) -> tuple[Tensor, ...]:
    per_slot = SLOT_BYTES // x_N.element_size()
    return (x_N,) if x_N.numel() <= per_slot else torch.split(x_N, per_slot)


def _sum_in_order(slots: tuple[Tensor, ...] | list[Tensor], out_N: Tensor) -> None:
    torch.add(slots[0], slots[1], out=out_N)
    for slot in slots[2:]:
        out_N.add_(slot)
