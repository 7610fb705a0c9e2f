"""One rank's model: loads it, owns its KV cache, executes plans.

`ranks` reaches the tensors only through it.

Every rank executes the same plans in the same order. Rank 0 also gets the rows and returns tokens.

Lack of memory is distinguished from other failures of a step: torch, numpy, Python and our kernels
report it in different ways.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import (
    Masks,
    OutOfMemory,
    PageMove,
    Rearrangement,
    SampledToken,
    SampleRow,
    StepPlan,
    needs_full_logits,
)
from ryzanstein.worker.kernels import REVISION
from ryzanstein.worker.model.adapting.factors import mapped_factors
from ryzanstein.worker.model.choosing import load_chosen
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.vocabulary import Best
from ryzanstein.worker.model.loading import LoadedModel, load_model
from ryzanstein.worker.products.adapted import AdapterRows
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.sampling.sampler import hidden_states, refuse_invalid, sample, scores
from ryzanstein.worker.settings.options import RunnerOptions

# Messages of plain RuntimeErrors: of torch's CPU allocator, and of a C++ exception that torch
# passes on.
_WORDS = ("can't allocate memory", "bad_alloc")


def is_shortage(error: BaseException) -> bool:
    """Returns whether memory was short: the same step might succeed if smaller, or later."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def give_back(device: torch.device) -> None:
    """Releases memory that torch caches for sizes it has seen, so that other sizes can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


_SCORED_ROWS = 32  # rows of logits at once: 32 MiB for a vocabulary of 262,144


class ModelRunner:
    """A loaded model on one rank."""

    def __init__(self, loaded: LoadedModel, tp: TensorParallel, options: RunnerOptions) -> None:
        spec, cache = loaded.spec, loaded.cache
        self._decoder, self._cache, self._tp, self._options = loaded.decoder, cache, tp, options
        self._inputs = loaded.inputs(tp, options)
        self._pages = loaded.pages(tp, options)
        self._size, self._loaded_pages = loaded.size, loaded.num_pages
        self._kernels = loaded.kernels.native
        self.without_native = "chosen" if options.step == "python" else "torch's operators compute"
        if self._kernels is not None and options.step == "auto":
            self.without_native = self._decoder.compile(self._kernels, cache, spec.hidden_size)
        program = self._decoder.program
        self.native_layers = 0.0 if program is None else program.share
        self.without_kernels = loaded.kernels.reason
        self.kernels_library = loaded.kernels.library
        self.company_matters = "torch's kernels sum in an order that depends on the batch" if self.without_kernels else ""
        self.quantization, self.divergence = loaded.quantization, loaded.divergence
        self.content = loaded.content
        self.extents, self.plans = loaded.size.extents, loaded.plans
        self.without_compression = loaded.without_compression
        self.num_unpacked = loaded.num_unpacked
        self.kv_compression = "none" if loaded.zones is None else options.kv_compression
        self.sparse_attention = options.sparse_attention
        self.context_length = spec.context_length
        self.vocab_size = spec.vocab_size
        self._whole_pages = spec.has_own_heads
        self._slots: set[int] = set()

    @classmethod
    def load(cls, model_dir: Path, tp: TensorParallel, options: RunnerOptions) -> ModelRunner:
        """Checks the checkpoint, then reads this rank's slices.

        Raises ModelRefused on every rank, before anything large is allocated.
        """
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        if options.torch_device.type == "cuda":
            # cuDNN's attention compiles a plan for each new shape, and a sequence has one more key in each step.
            torch.backends.cuda.enable_cudnn_sdp(False)
        load = load_chosen if options.quantization == "auto" else load_model
        return cls(load(model_dir, tp, options), tp, options)

    @property
    def num_blocks(self) -> int:
        """The number of the model's own blocks in the KV cache, the same on all ranks."""
        return self._size.num_blocks

    @property
    def hot_pages(self) -> int:
        """The number of hot pages, the same on all ranks; 0 if blocks are not compressed."""
        return self._size.hot_pages

    @property
    def max_blocks(self) -> int:
        """The number of blocks that the KV cache has room for: its own and those it may borrow."""
        return self._cache.num_blocks

    @property
    def block_bytes(self) -> int:
        """The size of one block on this rank, in bytes."""
        return self._cache.nbytes // self._cache.num_blocks

    @property
    def without_lending(self) -> str:
        """Why blocks can neither be borrowed nor lent; empty if they can."""
        return self._options.without_lending

    @property
    def kv_bytes(self) -> int:
        """The size of the model's own blocks and of hot pages on this rank, in bytes."""
        return self._size.nbytes

    def bytes_for(self, num_tokens: int) -> int:
        """Returns the size that this rank's cache needs for one sequence of so many tokens."""
        return self._size.bytes_for(num_tokens)

    def warm_up(self) -> None:
        """Runs the largest steps once, so that the first request pays for no allocation.

        The cache must be unused. Raises ModelRefused on rank 0 if none of many tokens yields finite
        logits: the checkpoint is broken.
        """
        for plan in self._warm_up_plans():
            logits_RV = self.hidden_logits(plan)
        if logits_RV is not None and not logits_RV.amax(dim=1).isfinite().any():
            raise ModelRefused(f"the logits of {len(logits_RV)} tokens are not finite: the weights are broken")

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow], masks: Masks | None = None) -> list[SampledToken]:
        """Computes the step.

        `rows` and the result are parallel to `plan.sampled` on rank 0 and empty elsewhere. `masks`
        are waited for when the logits are there; None: every row may draw any token. Raises
        SequencesFailed, ValueError for an inconsistent plan, and CollectiveTimeout for a lost peer.
        After OutOfMemory (PeerGaveUp on the other ranks) every rank must call `rejoin`.
        """
        self._check_rows(plan, rows)
        try:
            return self._execute(plan, rows, masks)
        except Exception as error:
            self._inputs.forget()
            if not is_shortage(error):
                raise
            shortage = str(error).split("\n", 1)[0]
        # Outside the handler: the caught error keeps every tensor of the step alive.
        give_back(self._options.torch_device)
        raise OutOfMemory(f"rank {self._tp.rank}: {shortage or 'no memory'}"[:512])

    @property
    def adaptable(self) -> Mapping[str, tuple[int, int]]:
        """The inputs and outputs of each weight that takes an adapter, whole, by its name in the checkpoint."""
        return self._decoder.adapters.shapes

    def map_adapter(self, slot: int, path: Path) -> None:
        """Keeps in a slot, a number from 1 on, the adapter that `adapters.packing.pack` wrote to a file, mapped.

        No plan may use the slot meanwhile. Raises ValueError if it is an adapter of another model; OSError.
        """
        factors = mapped_factors(path, self.adaptable, self._options.torch_device)
        if slot < 1:
            raise ValueError(f"{slot} is no slot of an adapter")
        self._decoder.adapters.map(slot, factors)
        self._decoder.expect_adapters()
        self._slots.add(slot)

    def drop_adapter(self, slot: int) -> None:
        """Forgets the adapter in a slot, if there is one."""
        self._decoder.adapters.drop(slot)
        self._slots.discard(slot)

    def rearrange(self, change: Rearrangement) -> None:
        """Changes the cache between two steps."""
        self._inputs.forget()
        self._cache.move(change.moves)
        if not self.without_lending:
            self._cache.release(change.num_blocks)

    @property
    def num_states(self) -> int:
        """The number of slots for states of sequences, the same on all ranks; 0: no layer keeps one."""
        return self._size.num_states

    @property
    def state_bytes(self) -> int:
        """The size of such a slot on this rank, in bytes, of all layers."""
        return self._size.state_bytes

    @property
    def max_sequences(self) -> int:
        """How many sequences may run: as many as are set, or as there are slots for."""
        return min(self._options.max_sequences, self._size.max_sequences or self._options.max_sequences)

    @property
    def page_bytes(self) -> int:
        """The size of a block with the heads of all ranks; 0: none leaves them, because of no use without a state."""
        return 0 if self.num_states or self._whole_pages else self._pages.page_bytes

    @property
    def hot_page_bytes(self) -> int:
        """The size of a hot page with the heads of all ranks; 0: there are none."""
        return self._pages.hot_page_bytes

    @property
    def page_format(self) -> str:
        """What is in a page and how it was computed: only pages of the same format are alike."""
        computed = str(self._options.torch_dtype).removeprefix("torch.")
        return f"{self._pages.description} computed={computed} weights={self.quantization}"

    @property
    def numerics(self) -> str:
        """How tokens are computed, and of what: the format of pages, whose kernels compute, the content of the files."""
        return f"{self.page_format} kernels={'torch' if self._kernels is None else REVISION} content={self.content}"

    def move_pages(self, move: PageMove, slab: mmap.mmap) -> None:
        """Copies this rank's heads of pages between two steps."""
        if not move.out:
            self._inputs.forget()
        self._pages.move(move, slab)

    def rejoin(self) -> None:
        """Returns when all ranks can begin a step again, after some rank gave one up.

        Raises CannotRejoin.
        """
        self._tp.collectives.rejoin()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, rows: Sequence[SampleRow], masks: Masks | None) -> list[SampledToken]:
        inputs = self._inputs.build(plan)
        if plan.sampled and not (plan.full_logits or plan.scored or plan.pooled):
            return _likeliest(self._decoder.greedy(inputs, self._cache))
        return self._with_rows(inputs, plan, rows, masks)

    def _with_rows(
        self, inputs: StepInputs, plan: StepPlan, rows: Sequence[SampleRow], masks: Masks | None
    ) -> list[SampledToken]:
        if plan.sampled and not (plan.scored or plan.pooled):
            return self._sample(self._decoder.logits(inputs, self._cache), rows, masks)
        hidden_RE = self._decoder.hidden(inputs, self._cache)
        num_sampled, head = len(plan.sampled), self._decoder.head
        tokens: list[SampledToken] = []
        if plan.sampled:
            sampled_RE = hidden_RE[:num_sampled]
            full = plan.full_logits
            adapted = None if inputs.last_adapters is None else inputs.last_adapters.part(slice(num_sampled))
            tokens = (
                self._sample(head.logits(sampled_RE, adapted), rows, masks)
                if full
                else _likeliest(head.greedy(sampled_RE, adapted))
            )
        if plan.scored:
            tokens += self._scores(hidden_RE[num_sampled : num_sampled + len(plan.scored)], plan, inputs.last_adapters)
        if plan.pooled and self._tp.rank == 0:
            tokens += hidden_states(hidden_RE[-len(plan.pooled) :], len(tokens))
        return tokens

    @torch.inference_mode()
    def hidden_logits(self, plan: StepPlan) -> Tensor | None:
        """Returns the step's logits [R, V] in float32 on rank 0, None elsewhere.

        `plan.sampled` must not be empty.
        """
        logits_RV = self._decoder.logits(self._inputs.build(plan), self._cache)
        return None if logits_RV is None else logits_RV.clone()

    def _sample(self, logits_RV: Tensor | None, rows: Sequence[SampleRow], masks: Masks | None) -> list[SampledToken]:
        if logits_RV is None:
            return []
        return sample(logits_RV, rows, self._kernels, None if masks is None else masks.wait())

    def _scores(self, hidden_PE: Tensor, plan: StepPlan, adapters: AdapterRows | None) -> Iterator[SampledToken]:
        """Yields the scores of prompt tokens on rank 0. All ranks compute the same parts of the rows."""
        for begin in range(0, len(plan.scored), _SCORED_ROWS):
            end, first = min(begin + _SCORED_ROWS, len(plan.scored)), len(plan.sampled)
            adapted = None if adapters is None else adapters.part(slice(first + begin, first + end))
            logits_PV = self._decoder.head.logits(hidden_PE[begin:end], adapted)
            if logits_PV is not None:
                yield from scores(logits_PV, plan.targets[begin:end], plan.num_top, len(plan.sampled) + begin)

    def _check_rows(self, plan: StepPlan, rows: Sequence[SampleRow]) -> None:
        if any(slot and slot not in self._slots for slot, _ in plan.adapters):
            raise ValueError(f"step {plan.step}: adapters {plan.adapters}, and only slots {sorted(self._slots)} have one")
        if self._tp.rank > 0:
            return
        if len(rows) != len(plan.sampled):
            raise ValueError(f"step {plan.step}: {len(rows)} rows for {len(plan.sampled)} sampled sequences")
        if not plan.full_logits and any(map(needs_full_logits, rows)):
            raise ValueError(f"step {plan.step}: a row needs full logits, but the plan does not set full_logits")

    def _warm_up_plans(self) -> list[StepPlan]:
        """Returns a prefill of the whole token budget and a decode of the whole batch.

        Both are limited to what the cache holds.
        """
        whole = self._loaded_pages * self._options.block_size
        length = min(self._options.max_tokens_per_step, whole, self.context_length)
        table = range(self.extents.pages(length))
        batch = min(self.max_sequences, self._loaded_pages)
        prefill = self.plans.plan([0] * length, [length], [0], [table], [0])
        some = [b * self.vocab_size // batch for b in range(batch)]
        decode = self.plans.plan(some, [1] * batch, [0] * batch, [[b] for b in range(batch)], list(range(batch)))
        return [prefill, decode]


def _likeliest(best: Best | None) -> list[SampledToken]:
    """Returns the tokens of the greatest logits on rank 0, nothing elsewhere. Raises SequencesFailed."""
    if best is None:
        return []
    logits, tokens = best
    refuse_invalid(logits)
    return [SampledToken(token_id) for token_id in tokens]
