"""Chooses the format of a model's weights by what 8 bits change in its answers: `--quantization auto`.

The model, loaded in 8 bits, writes a few texts, drawn with fixed seeds. Then the weights in full
precision read the same texts, layer by layer. What 8 bits change is the Kullback-Leibler divergence
between the two predictions of each next token: the nats by which the loss grows on text like the
model's own. The steps are the same on all ranks, and the result is the same wherever the kernels
give the same bits, after a restart and on other nodes too.

Legend: S texts, P tokens of a text, R their rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ryzanstein.files.model_paths import is_gguf
from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.architectures.registry import read_config
from ryzanstein.worker.checkpoints.checkpoint import MappedWeights
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import SampleRow, SequencesFailed, StepPlan
from ryzanstein.worker.model.decoder import Decoder
from ryzanstein.worker.model.loading import LoadedModel, load_model, open_model
from ryzanstein.worker.model.sparse_layers import sparsified
from ryzanstein.worker.products.formats import WeightFormat
from ryzanstein.worker.refusal import BeyondHalf
from ryzanstein.worker.sampling.sampler import sample
from ryzanstein.worker.settings.options import RunnerOptions
from ryzanstein.worker.settings.quantization import Format

MOST_DIVERGENCE = 0.04
"""Nats for each token.

The first tokens of a text are the hardest to predict and the most easily changed: on long texts the
divergence is a third to a sixth of this (docs/operate/quantize-and-convert.md), less than one or two percent of
perplexity.
"""
_TEXTS, _TOKENS = 4, 32
_ROWS_AT_ONCE = 16  # logits of so many rows are in memory at once


def load_chosen(model: Path, tp: TensorParallel, options: RunnerOptions) -> LoadedModel:
    """Loads a model in 8 bits, or in 16 if 8 change its answers too much.

    A model that is in few bits already, and one that is not on a CPU in float32, stays as it is.
    Raises ModelRefused.
    """
    on_cpu = options.torch_device.type == "cpu" and options.torch_dtype == torch.float32
    if not on_cpu or _is_quantized(model):
        return _load(model, tp, options, "none")
    loaded = _load(model, tp, options, "int8")
    divergence = _Trial(model, tp, options, loaded).divergence()
    if divergence > MOST_DIVERGENCE:
        del loaded
        _meet(tp)
        loaded = _load_wider(model, tp, options)
    return replace(loaded, divergence=divergence)


def _load(model: Path, tp: TensorParallel, options: RunnerOptions, kind: Format) -> LoadedModel:
    return load_model(model, tp, replace(options, quantization=kind))


def _load_wider(model: Path, tp: TensorParallel, options: RunnerOptions) -> LoadedModel:
    """Loads the model in 16 bits, or in full precision where a rank's weights exceed float16."""
    loaded: LoadedModel | None = None
    with suppress(BeyondHalf):
        loaded = _load(model, tp, options, "fp16")
    refusals = tp.collectives.all_reduce(torch.tensor([float(loaded is None)]))
    if loaded is not None and not refusals.item():
        return loaded
    del loaded
    _meet(tp)
    return _load(model, tp, options, "none")


def _meet(tp: TensorParallel) -> None:
    """Returns when all ranks have released a model: the next load measures the memory that is free."""
    tp.collectives.all_reduce(torch.zeros(1))


def _is_quantized(model: Path) -> bool:
    return is_gguf(model) or bool(read_config(model).get("quantization_config"))


class _Trial:
    """A short run of a model that was loaded in 8 bits, and of its weights in full precision.

    Both use its cache, which must be unused.
    """

    def __init__(self, model: Path, tp: TensorParallel, options: RunnerOptions, loaded: LoadedModel) -> None:
        self._model, self._tp, self._options, self._loaded = model, tp, options, loaded
        self._inputs = loaded.inputs(tp, options)
        num_pages = loaded.num_pages
        room = num_pages * options.block_size
        self._num_tokens = min(_TOKENS, loaded.spec.context_length, options.max_tokens_per_step, room)
        self._blocks = -(-self._num_tokens // options.block_size)
        most = min(options.max_sequences, options.max_tokens_per_step // self._num_tokens, num_pages // self._blocks)
        if loaded.size.num_states:  # each page of a text has a slot of its own
            most = min(most, max(1, loaded.size.num_states // self._blocks))
        self._num_texts = min(_TEXTS, most)

    @torch.inference_mode()
    def divergence(self) -> float:
        """Returns the mean divergence of a token, on every rank; infinity if there is none that is finite."""
        ids_SP, few_RE = self._written()
        options, native = self._options, self._loaded.kernels.native
        device, dtype = options.torch_device, options.torch_dtype
        spec, files = open_model(self._model)
        spec = sparsified(spec, options.sparse_attention)
        floats = WeightFormat("none", device, dtype, native)
        with MappedWeights(files, dtype, device, floats, native, on_read=lambda _: options.on_read(0, 0)) as weights:
            decoder = Decoder(weights, self._tp, spec, passing=True)
            inputs = self._inputs.build(self._plan(ids_SP, 0))
            whole_RE = decoder.hidden(replace(inputs, last_R=torch.arange(ids_SP.numel())), self._loaded.cache)
            total = torch.zeros(1, dtype=torch.float64)
            for rows in _parts(len(few_RE)):
                pair = self._loaded.decoder.head.logits(few_RE[rows]), decoder.head.logits(whole_RE[rows])
                total += 0 if pair[0] is None or pair[1] is None else _divergence(pair[0], pair[1])
        mean = self._tp.collectives.broadcast(total).item() / len(few_RE)
        return mean if mean < torch.inf else torch.inf

    def _written(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens [S, P] of the texts, and the hidden states [S * P, E] that predict the next of each."""
        ids_SP = torch.zeros(self._num_texts, self._num_tokens, dtype=torch.int64)
        ids_SP[:, 0] = self._first()
        states = []
        for position in range(self._num_tokens):
            inputs = self._inputs.build(self._plan(ids_SP[:, position : position + 1], position))
            states.append(self._loaded.decoder.hidden(inputs, self._loaded.cache).clone())
            if position + 1 < self._num_tokens:
                ids_SP[:, position + 1] = self._drawn(states[-1], position)
        return ids_SP, torch.stack(states, dim=1).flatten(0, 1)

    def _first(self) -> Tensor:
        """Returns the tokens with which the texts begin: the model's own for that, or any others."""
        vocab_size = self._loaded.spec.vocab_size
        begin = read_config(self._model).get("bos_token_id")
        if isinstance(begin, int) and 0 <= begin < vocab_size:
            return torch.tensor(begin)
        return torch.arange(self._num_texts) * vocab_size // self._num_texts

    def _drawn(self, hidden_SE: Tensor, index: int) -> Tensor:
        """Returns the next token of each text, on every rank. Rank 0 draws them."""
        logits_SV, ids_S = self._loaded.decoder.head.logits(hidden_SE), torch.zeros(len(hidden_SE), dtype=torch.int64)
        if logits_SV is not None:
            rows = [SampleRow(SamplingParams(temperature=1.0, seed=seed), 0, index, [], []) for seed in range(len(logits_SV))]
            try:
                tokens = sample(logits_SV, rows, self._loaded.kernels.native)
                ids_S = torch.tensor([token.token_id for token in tokens])
            except SequencesFailed:
                pass  # the divergence will not be finite either
        return self._tp.collectives.broadcast(ids_S)

    def _plan(self, ids_SP: Tensor, num_context: int) -> StepPlan:
        num_texts, count = ids_SP.shape
        tables = [list(range(s * self._blocks, (s + 1) * self._blocks)) for s in range(num_texts)]
        ids = ids_SP.flatten().tolist()
        return self._loaded.plans.plan(ids, [count] * num_texts, [num_context] * num_texts, tables, list(range(num_texts)))


def _divergence(few_RV: Tensor, whole_RV: Tensor) -> Tensor:
    """Returns the sum over rows of the divergence of the first prediction from the second."""
    few_RV, whole_RV = few_RV.log_softmax(dim=1), whole_RV.log_softmax(dim=1)
    return (whole_RV.exp() * (whole_RV - few_RV)).sum(dtype=torch.float64)


def _parts(num_rows: int) -> Iterator[slice]:
    return (slice(first, min(first + _ROWS_AT_ONCE, num_rows)) for first in range(0, num_rows, _ROWS_AT_ONCE))
