"""One decoder for all architectures: embedding, layers of attention and MLP, final norm, head.

A layer costs two all-reduces, or one if its halves run in parallel.

Legend: T new tokens, R sampled rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import KVCache, LayerPages
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.cache.zoned_cache import ZonedCache
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.embedding import Embedding
from ryzanstein.worker.model.layers.experts import feed_forward
from ryzanstein.worker.model.layers.layerwise.beside import ExpertsBeside
from ryzanstein.worker.model.layers.layerwise.inputs import LayerInput, PerLayerInputs
from ryzanstein.worker.model.layers.mixing import mixing_half
from ryzanstein.worker.model.layers.norm import Norm, emit_norm, new_norm, optional_norm, row_norm
from ryzanstein.worker.model.layers.rotary import Rotary
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.layers.vocabulary import Best, VocabParallelHead, VocabularyShard
from ryzanstein.worker.model.program.ops import Call, Goal, NotNative, Ops, StepContext, has_ops
from ryzanstein.worker.model.program.running import Program
from ryzanstein.worker.products.adapted import AdapterRows


class DecoderLayer:
    """An attention half and an MLP half, or one of them, each with the architecture's norms and a residual."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, index: int) -> None:
        names, prefix = spec.names, spec.names.layer.format(layer=index)
        self._mixing = mixing_half(source, tp, spec, index)
        self._mlp = feed_forward(source, tp, spec, index)
        mixing_norms, mlp_norms = (names.attention_norm, names.attention_post_norm), (names.mlp_norm, names.mlp_post_norm)
        wanted = (*(mixing_norms if self._mixing else (None, None)), *(mlp_norms if self._mlp else (None, None)))
        self._attention_norm, self._attention_post_norm, self._mlp_norm, self._mlp_post_norm = (
            optional_norm(source, prefix, name, spec.hidden_size, spec.norm) for name in wanted
        )
        self._collectives, self._scale = tp.collectives, spec.residual_scale
        self._parallel, self._shared_norm = spec.parallel, names.mlp_norm is None
        moe, own = spec.layers[index].experts, spec.per_layer
        beside = names.beside if moe is not None else None
        self._beside = None if moe is None or beside is None else ExpertsBeside(source, tp, spec, (beside, moe), index)
        self._input = None if own is None else LayerInput(source, spec, own, prefix)
        self._is_special = own is not None or self._beside is not None or names.layer_scale is not None
        self._last_scale = None if names.layer_scale is None else _read_one(source, prefix + names.layer_scale)

    def __call__(
        self,
        x_TE: Tensor,
        inputs: StepInputs,
        angles: Sequence[Angles],
        pages: LayerPages,
        own_TP: Tensor | None = None,
    ) -> Tensor:
        """Returns the next layer's input. `own_TP` is what this layer has besides, where layers have that."""
        x_TE = self._halves(x_TE, inputs, angles, pages)
        if self._input is not None:
            assert own_TP is not None
            x_TE = self._input(x_TE, own_TP, inputs.adapters)
        return x_TE if self._last_scale is None else x_TE.mul_(self._last_scale)

    def emit(self, ops: Ops, pages: LayerPages) -> float:
        """Adds the layer, which leaves the next one's input where its own was. Returns how much of it is ops."""
        x, y, width = ops.buffer("x", ops.hidden_size), ops.buffer("y", ops.hidden_size), ops.hidden_size
        whole = Call(x, width, x, partial(self._called, pages))
        if self._is_special or self._mixing is None or self._mlp is None:
            return ops.either(partial(_refuse, "a layer of one half, or with inputs, scales or experts of its own"), whole)
        if self._parallel:
            return ops.either(partial(self._emit_parallel, ops, x, pages), whole)
        mixing = ops.either(partial(self._emit_mixing, ops, x, pages), Call(x, width, y, partial(self._mixed, pages)))
        mlp = ops.either(
            partial(self._emit_mlp, ops, y), Call(y, width, x, lambda y_TE, step: self._second_half(y_TE, step.inputs.adapters))
        )
        return (mixing + mlp) / 2

    def _emit_parallel(self, ops: Ops, x: int, pages: LayerPages) -> None:
        source = emit_norm(ops, self._attention_norm, x)
        out = ops.product(*has_ops(self._mixing).emit(ops, *source, pages), "y")
        source = source if self._shared_norm else emit_norm(ops, self._mlp_norm, x)
        ops.rows(out, out, residual=ops.product(*has_ops(self._mlp).emit(ops, *source), "z"))
        ops.rows(ops.all_reduced(out), x, residual=x, norm=row_norm(self._mlp_post_norm), factor=self._scale)

    def _emit_mixing(self, ops: Ops, x: int, pages: LayerPages) -> None:
        last = has_ops(self._mixing).emit(ops, *emit_norm(ops, self._attention_norm, x), pages)
        ops.end_half(last, "y", x, norm=row_norm(self._attention_post_norm), factor=self._scale)

    def _emit_mlp(self, ops: Ops, y: int) -> None:
        last = has_ops(self._mlp).emit(ops, *emit_norm(ops, self._mlp_norm, y))
        ops.end_half(last, "x", y, norm=row_norm(self._mlp_post_norm), factor=self._scale)

    def _called(self, pages: LayerPages, x_TE: Tensor, step: StepContext) -> Tensor:
        return self(x_TE, step.inputs, step.angles, pages)

    def _mixed(self, pages: LayerPages, x_TE: Tensor, step: StepContext) -> Tensor:
        return self._first_half(x_TE, step.inputs, step.angles, pages)

    def _halves(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        if self._mixing is None or self._mlp is None:
            return (
                self._first_half(x_TE, inputs, angles, pages) if self._mlp is None else self._second_half(x_TE, inputs.adapters)
            )
        if not self._parallel:
            return self._second_half(self._first_half(x_TE, inputs, angles, pages), inputs.adapters)
        normed_TE = self._attention_norm(x_TE)
        attended_TE = self._mixing(normed_TE, inputs, angles, pages)
        mlp_TE = self._mlp(normed_TE if self._shared_norm else self._mlp_norm(x_TE), inputs.adapters)
        return self._added(x_TE, attended_TE.add_(mlp_TE), self._mlp_post_norm)

    def _first_half(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        assert self._mixing is not None
        attended_TE = self._mixing(self._attention_norm(x_TE), inputs, angles, pages)
        return self._added(x_TE, attended_TE, self._attention_post_norm)

    def _second_half(self, x_TE: Tensor, rows: AdapterRows | None = None) -> Tensor:
        assert self._mlp is not None
        mlp_TE = self._mlp(self._mlp_norm(x_TE), rows)
        if self._beside is not None:
            return self._mlp_post_norm(self._beside(x_TE, mlp_TE)).add_(x_TE)
        return self._added(x_TE, mlp_TE, self._mlp_post_norm)

    def _added(self, x_TE: Tensor, part_TE: Tensor, post_norm: Norm) -> Tensor:
        """All-reduces the output of one half of the layer and adds it to the residual."""
        out_TE = post_norm(self._collectives.all_reduce(part_TE))
        return (out_TE if self._scale == 1 else out_TE.mul_(self._scale)).add_(x_TE)


class Decoder:
    """This rank's part of a model, built from what `source` supplies: weights, or only shapes.

    `passing`: a layer is built whenever it is run and kept no longer, so that few weights are in
    memory at once. The source must supply it then.
    """

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, *, passing: bool = False) -> None:
        names = spec.names
        shard = VocabularyShard(source, tp, names.embedding, spec.vocab_size, spec.hidden_size, tied=spec.tied_head)
        self._embedding = Embedding(source, shard, tp, spec)
        layers = (partial(DecoderLayer, source, tp, spec, index) for index in range(spec.num_layers))
        self._layers: list[Callable[[], DecoderLayer]] = list(layers) if passing else [_kept(layer()) for layer in layers]
        self._tp, self.adapters = tp, source.adapters
        self.program: Program | None = None
        self._adapted: Program | None = None
        self._compiled: Callable[[bool], tuple[Program | None, str]] | None = None
        self._final_norm = new_norm(source, names.final_norm, spec.hidden_size, spec.norm)
        head = shard if spec.tied_head else VocabularyShard(source, tp, names.head, spec.vocab_size, spec.hidden_size)
        self.head = VocabParallelHead(source, head, tp, spec)
        self._planes = [(plane, layer.planes) for plane, layer in zip(layer_groups(spec).planes, spec.layers, strict=True)]
        own = spec.per_layer
        self._layer_inputs = None if own is None else PerLayerInputs(source, tp, spec, own)
        self._rotaries = [Rotary(rotary, shard.table.device, source.kernels) for rotary in spec.rotaries]

    def compile(self, kernels: NativeKernels, cache: KVCache | ZonedCache, hidden_size: int) -> str:
        """Makes a program of what has ops; layers and ends that have none stay functions beside it.

        Returns why the first layer without ops has none; empty if all have. Nothing may replace a weight or the
        cache from then on.
        """
        self._compiled = partial(self._compile, kernels, cache, hidden_size)
        self.program, reason = self._compiled(False)
        return reason

    def expect_adapters(self) -> None:
        """Makes a program of what has ops for steps with adapters, if there is one for those without."""
        if self.program is not None and self._adapted is None and self._compiled is not None:
            self._adapted, _ = self._compiled(True)

    def _compile(
        self, kernels: NativeKernels, cache: KVCache | ZonedCache, hidden_size: int, adapting: bool
    ) -> tuple[Program | None, str]:
        ops, native = Ops(hidden_size, self._tp.size, self._tp.collectives.meeting is not None, adapting), 0.0
        angles = self._emit_begin(ops)
        ops.reason = ""
        for index, (planes, layer) in enumerate(zip(self._planes, self._layers, strict=True)):
            ops.layer = index
            native += layer().emit(ops, cache.pages(index, *planes))
        ops.end_goal()
        if not native:
            return None, ops.reason
        self._emit_end(ops)
        adapters = self.adapters if adapting else None
        share = native / len(self._layers)
        return Program(kernels.program, ops, share, self._tp.collectives, angles, adapters=adapters), ops.reason

    def hidden(self, inputs: StepInputs, cache: KVCache | ZonedCache) -> Tensor:
        """Runs the step, fills the cache, and returns the hidden states for the head, [R, E]."""
        program = self._program_of(inputs)
        if program is not None and program.takes(inputs):
            return self._final_norm(program.hidden(inputs)[inputs.last_R])
        x_TE = self._embedded(inputs)
        angles = self._angles(inputs.positions_T, x_TE.dtype)
        own_LTP = None if self._layer_inputs is None else self._layer_inputs(inputs.ids_T, x_TE, inputs.adapters)
        for index, (planes, layer) in enumerate(zip(self._planes, self._layers, strict=True)):
            own_TP = None if own_LTP is None else own_LTP[index]
            x_TE = layer()(x_TE, inputs, angles, cache.pages(index, *planes), own_TP)
        return self._final_norm(x_TE[inputs.last_R])

    def _program_of(self, inputs: StepInputs) -> Program | None:
        return self.program if inputs.adapters is None else self._adapted

    def _embedded(self, inputs: StepInputs) -> Tensor:
        return self._embedding(inputs.ids_T, inputs.positions_T, inputs.adapters)

    def logits(self, inputs: StepInputs, cache: KVCache | ZonedCache) -> Tensor | None:
        """Runs the step. Returns the logits of the wanted rows as the head does; they are valid until the next step."""
        program = self._program_of(inputs)
        if program is not None and program.takes(inputs, Goal.LOGITS):
            return self.head.gathered(self.head.capped(program.logits(inputs)))
        return self.head.logits(self.hidden(inputs, cache), inputs.last_adapters)

    def greedy(self, inputs: StepInputs, cache: KVCache | ZonedCache) -> Best | None:
        """Runs the step. Returns the greatest logits of the wanted rows and their tokens as the head does."""
        program = self._program_of(inputs)
        if program is not None and program.takes(inputs, Goal.TOKENS):
            return self.head.merged(*program.greatest(inputs))
        if program is not None and program.takes(inputs, Goal.LOGITS):
            return self.head.likeliest(self.head.capped(program.logits(inputs)))
        return self.head.greedy(self.hidden(inputs, cache), inputs.last_adapters)

    def _angles(self, positions_T: Tensor, dtype: torch.dtype = torch.float32) -> list[Angles]:
        return [rotary.angles(positions_T, dtype) for rotary in self._rotaries]

    def _emit_begin(self, ops: Ops) -> Callable[[Tensor], list[Angles]] | None:
        """Adds what is before the layers. Returns a function for the angles if they have no ops."""
        x, ops.layer, ops.place = ops.buffer("x", ops.hidden_size), -1, "embedding"
        ops.num_rotaries = len(self._rotaries)
        own = Call(x, ops.hidden_size, x, lambda _, step: self._embedded(step.inputs))
        ops.either(partial(self._embedding.emit, ops, x), own)
        try:
            for number, rotary in enumerate(self._rotaries):
                rotary.emit(ops, number)
        except NotNative:
            return self._angles
        return None

    def _emit_end(self, ops: Ops) -> None:
        """Adds what is after the layers, as far as it has ops."""
        with suppress(NotNative):
            norm = row_norm(self._final_norm)
            if norm is not None:
                self.head.emit(ops, ops.buffer("x", ops.hidden_size), norm)


def _refuse(reason: str) -> None:
    raise NotNative(reason)


def _read_one(source: WeightSource, name: str) -> Tensor:
    number = source.new(1)
    source.read(name, (1,), number)
    return number


def _kept(layer: DecoderLayer) -> Callable[[], DecoderLayer]:
    return lambda: layer
