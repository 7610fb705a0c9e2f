"""The logits processor that vLLM loads: `vllm serve --logits-processors ryzanstein.worker.engines.vllm.inside.sampler:Sampler`.

vLLM has two interfaces for such processors, one for each of its model runners, and one class has both:
`apply(logits)` with the state of `update_state` for V1, `apply(logits, ctx)` with that of
`add_request` for V2, which needs a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from ryzanstein.worker.engines.asking import AskedRow, unpacked
from ryzanstein.worker.engines.vllm.board import VARIABLE, BoardSlot
from ryzanstein.worker.engines.vllm.inside.grammars import RowGrammars
from ryzanstein.worker.engines.vllm.inside.rows import BatchRow, FreeRow, decide, free_row, is_plain, new_row
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.kernels.opening import open_kernels
from ryzanstein.worker.settings.options import RunnerOptions

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as RunnerV2Processor
except ImportError:  # a release before 0.32, or a build without Triton
    RunnerV2Processor = LogitsProcessor


logger = logging.getLogger("vllm.ryzanstein")


class Sampler(*dict.fromkeys((LogitsProcessor, RunnerV2Processor))):  # type: ignore[misc]
    """Decides the tokens of an agent's requests. Others' requests are left alone."""

    def __init__(self, vllm_config: Any, state: Any, is_pin_memory: bool | None = None) -> None:
        """`state` is the device for V1, and the tokens of all requests for V2."""
        if getattr(vllm_config, "speculative_config", None) is not None:
            raise ValueError("the ryzanstein sampler does not work with speculative decoding yet")
        self._state = state
        self._grammars = RowGrammars()
        self._kernels = _kernels(state)
        self._board = _slot(vllm_config)
        self._places: dict[int, tuple[BatchRow, list[int]]] = {}
        """V1: the rows of the batch, each with the output of its request, which vLLM appends to."""
        self._entering: dict[int, AskedRow] = {}
        """V2: the requests of slots whose tokens are not on the device before the next step."""
        self._rows: dict[int, BatchRow] = {}
        self._picked: dict[int, list[int]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for an argument that no agent sends."""
        unpacked(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """V1: takes what entered, left or moved within the batch. It is called before each step."""
        if self._board is not None:
            self._board.begin()
        if batch_update is not None:
            with self._guarded():
                try:
                    self._update(batch_update)
                except Exception:
                    self._places.clear()  # rows of a change made by half would decide tokens of others
                    raise

    def _update(self, batch_update: BatchUpdate) -> None:
        places = self._places
        for index in batch_update.removed:
            places.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            places.pop(index, None)
            if (asked := unpacked(params.extra_args)) is not None:
                places[index] = new_row(asked, prompt_ids or [], self._grammars), output_ids
        for first, second, direction in batch_update.moved:
            one, other = places.pop(first, None), places.pop(second, None)
            if one is not None:
                places[second] = one
            if other is not None and direction == MoveDirectionality.SWAP:
                places[first] = other

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """V2: takes a request that enters a slot; returns whether its tokens are decided here."""
        for known in (self._rows, self._picked, self._entering):
            known.pop(req_idx, None)
        asked = unpacked(sampling_params.extra_args)
        if asked is None or is_plain(asked):
            return False
        self._entering[req_idx] = asked
        return True

    def apply_staged_writes(self) -> None:
        """V2: is called before each step, when the tokens of new requests are on the device."""
        if self._board is not None:
            self._board.begin()
        with self._guarded():
            while self._entering:
                self._enter(*self._entering.popitem())

    def _enter(self, slot: int, asked: AskedRow) -> None:
        num_tokens = int(self._state.prompt_len.np[slot])
        self._picked[slot] = []
        self._rows[slot] = free_row(asked, num_tokens) or new_row(asked, self._tokens(slot, 0, num_tokens), self._grammars)

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Leaves one finite logit in each row that is decided here. See `_guarded` for what happens if it fails."""
        try:
            with self._guarded():
                if ctx is None:
                    self._apply_batch(logits)
                else:
                    self._apply_slots(logits, ctx)
            return logits
        finally:
            if self._board is not None:
                self._board.end()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Counts a failure where the agent sees it before it sees the step's tokens, which are vLLM's then.

        Without a board nobody could tell that they are: vLLM ends with the error, and the answers go on elsewhere.
        """
        try:
            yield
        except Exception:
            if self._board is None:
                raise
            logger.exception("the ryzanstein sampler failed; what vLLM draws in its place is not passed on")
            self._board.fail()

    def _apply_batch(self, logits: Tensor) -> None:
        """V1: a row of logits for each place of the batch."""
        places = {index: place for index, place in self._places.items() if index < len(logits)}
        for row, output_ids in places.values():
            row.take(output_ids)
        decide(logits, {index: row for index, (row, _) in places.items()}, self._grammars, self._kernels)

    def _apply_slots(self, logits: Tensor, ctx: Any) -> None:
        """V2: rows are in any order, one for each request. What is read of `ctx` is on the host: nothing waits for the GPU."""
        rows: dict[int, BatchRow] = {}
        slots = ctx.idx_mapping_np.tolist()
        lengths = ctx.seq_lens_upper_bound_np[: len(slots)].tolist()  # padded to the batch of a CUDA graph
        for s, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            row = self._rows.get(slot)
            if row is None or length < self._state.prefill_len.np[slot]:
                continue  # others' requests, and tokens that go on: what is drawn after these is thrown away
            num_output = length - int(self._state.prompt_len.np[slot])
            if isinstance(row, FreeRow):
                row.count(num_output)
            else:
                row.take(self._output(slot, num_output))
            rows[s] = row
        for s, token_id in decide(logits, rows, self._grammars).items():
            self._picked[slots[s]][rows[s].num_taken :] = [token_id]

    def _output(self, slot: int, num_output: int) -> list[int]:
        """Returns the request's output so far: what was decided here, or, where vLLM decided, what it says."""
        picked = self._picked[slot]
        if len(picked) < num_output:
            num_prompt = int(self._state.prompt_len.np[slot])
            picked[:] = self._tokens(slot, num_prompt, num_prompt + num_output)
        return picked[:num_output]

    def _tokens(self, slot: int, begin: int, end: int) -> list[int]:
        """V2: waits for the GPU."""
        return list(self._state.all_token_ids.gpu[slot, begin:end].tolist())


def _kernels(state: Any) -> NativeKernels | None:
    """Returns our own kernels where logits are on a CPU, compiled first if the package has none; None: there are none."""
    if not isinstance(state, torch.device) or state.type != "cpu":
        return None
    try:
        opened = open_kernels(RunnerOptions())
    except Exception as error:  # of whatever kind: the tokens are the same without
        logger.warning("no native kernels: %s", error)
        return None
    logger.info("the ryzanstein sampler draws with %s", opened.library or f"torch: {opened.reason}")
    return opened.native


def _slot(vllm_config: Any) -> BoardSlot | None:
    """Returns the slot of this rank; None: nobody wants to know, or the file cannot be written."""
    if not (path := os.environ.get(VARIABLE)):
        return None
    parallel = getattr(vllm_config, "parallel_config", None)
    try:
        return BoardSlot(path, getattr(parallel, "rank", 0), getattr(parallel, "world_size", 1))
    except OSError as error:
        logger.warning("%s: %s; a stall will name no rank", VARIABLE, error)
        return None
