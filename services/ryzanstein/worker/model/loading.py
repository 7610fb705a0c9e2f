"""Loads a model: reads config.json, checks tensors and memory, agrees with peers, reads weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ryzanstein.files.model_paths import is_gguf
from ryzanstein.worker.architectures.registry import read_config, spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec, WeightNames
from ryzanstein.worker.cache.kv_cache import KVCache
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.cache.pages import RankPages
from ryzanstein.worker.cache.sizes import CacheRequest, CacheSize, cache_size, slot_width
from ryzanstein.worker.cache.staging import Staging
from ryzanstein.worker.cache.states import StateCache
from ryzanstein.worker.cache.zoned_cache import ZonedCache
from ryzanstein.worker.cache.zones import Zones, without_compression, zones_of
from ryzanstein.worker.checkpoints.checkpoint import CheckedWeights, MappedWeights, WeightFiles
from ryzanstein.worker.checkpoints.content import DIGEST_BYTES, ModelContent, Seen
from ryzanstein.worker.checkpoints.memory import available_bytes
from ryzanstein.worker.checkpoints.quantized_files.opening import open_quantized
from ryzanstein.worker.checkpoints.safetensors_files import SafetensorsFiles
from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry
from ryzanstein.worker.checkpoints.tensor_files import read_tensor_files
from ryzanstein.worker.checkpoints.tying import untied_where_stored, with_embedding
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.opening import OpenedKernels, open_kernels
from ryzanstein.worker.model.alibi import alibi_bias
from ryzanstein.worker.model.decoder import Decoder
from ryzanstein.worker.model.gguf_files import open_gguf
from ryzanstein.worker.model.inputs.builder import GroupReader, InputBuilder
from ryzanstein.worker.model.inputs.decoding import decode_steps
from ryzanstein.worker.model.inputs.for_torch.batches import DecodeBatches
from ryzanstein.worker.model.inputs.for_torch.masks import ScoreMasks
from ryzanstein.worker.model.inputs.for_torch.torch_reader import fastest_view
from ryzanstein.worker.model.inputs.layout import CacheLayout
from ryzanstein.worker.model.inputs.paged import PagedSegments
from ryzanstein.worker.model.inputs.readers import paged_readers, torch_readers, with_taps
from ryzanstein.worker.model.plain_plans import PlainPlans
from ryzanstein.worker.model.program.sizes import program_bytes
from ryzanstein.worker.model.sparse_layers import refuse_unfit, sparsified
from ryzanstein.worker.products.formats import WeightFormat
from ryzanstein.worker.refusal import CheckpointError, ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions
from ryzanstein.worker.settings.quantization import Format

EMBEDDING_MODULES = "modules.json"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One rank's part of a model and its KV cache."""

    spec: DecoderSpec
    decoder: Decoder
    cache: KVCache | ZonedCache
    kernels: OpenedKernels
    size: CacheSize
    """The size of what is the model's own; the cache may have room for more blocks."""
    content: str
    """The digest of `ModelContent`."""
    quantization: Format
    zones: Zones | None = None
    without_compression: str = ""
    """Why keys and values are not compressed although that is set."""
    states: StateCache | None = None
    num_unpacked: int = 0
    """The matrices that the file has in blocks and this rank keeps as floats: its columns are not whole blocks."""
    divergence: float | None = None
    """What the choice of the format rests on, in nats for each token; None if it was set."""

    @property
    def plans(self) -> PlainPlans:
        """Plans for this cache without a scheduler."""
        return PlainPlans(self.size.extents, self.size.hot_pages, self.size.num_states)

    @property
    def num_pages(self) -> int:
        """The pages of all layers that the model's own blocks hold."""
        return self.size.num_blocks // len(self.size.extents.windows)

    def inputs(self, tp: TensorParallel, options: RunnerOptions) -> InputBuilder:
        """Returns what makes tensors of plans for this decoder and this cache."""
        layout = CacheLayout(self.cache.num_blocks, options.block_size, options.torch_device)
        staging = None if isinstance(self.cache, ZonedCache) else _staging(self.cache)
        readers = self._readers(layout, staging, tp, options)
        decoding = decode_steps(readers, self.size.extents) if self.states is None else None
        return InputBuilder(layout, self.size.extents, readers, staging, self.states, decoding)

    def _readers(
        self, layout: CacheLayout, staging: Staging | None, tp: TensorParallel, options: RunnerOptions
    ) -> list[GroupReader]:
        return with_taps(self._attention_readers(layout, staging, tp, options), layout, layer_groups(self.spec).taps)

    def _attention_readers(
        self, layout: CacheLayout, staging: Staging | None, tp: TensorParallel, options: RunnerOptions
    ) -> list[GroupReader]:
        spec, native, extents, rules = self.spec, self.kernels.native, self.size.extents, layer_groups(self.spec).rules
        bias = alibi_bias(spec, tp, options.torch_dtype, options.torch_device)
        if native is not None:
            return paged_readers(PagedSegments(native.attention, layout, bias), extents, rules, self.zones)
        assert self.zones is None, "only our own kernels read compressed blocks"
        assert not rules, "only our own kernels read sparsely"
        batches = DecodeBatches(layout, ScoreMasks(layout, options.torch_dtype, bias), staging)
        on_gpu = options.torch_device.type == "cuda"
        view_keys = fastest_view(self.cache.slot_bytes, torch.get_num_threads(), on_gpu=on_gpu)
        return torch_readers(batches, extents.windows, view_keys, knows_causal=spec.has_plain_scores, on_gpu=on_gpu)

    def pages(self, tp: TensorParallel, options: RunnerOptions) -> RankPages:
        """Returns where pages of the cache leave and arrive."""
        return RankPages(self.spec, tp, self.cache, options, self.zones)


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result of a check that passed: what loading needs."""

    spec: DecoderSpec
    files: WeightFiles
    weight_format: WeightFormat
    kernels: OpenedKernels
    weight_bytes: int
    read_bytes: int
    size: CacheSize
    content: ModelContent
    zones: Zones | None
    without_compression: str
    borrowable_blocks: int
    num_unpacked: int


def load_model(model_dir: Path, tp: TensorParallel, options: RunnerOptions) -> LoadedModel:
    """Loads this rank's part of the model.

    Raises ModelRefused on every rank if one rank refuses, before anything large is allocated.
    """
    checked = _agreed(model_dir, tp, options)
    if checked.kernels.native is not None:
        tp.collectives.use(checked.kernels.native.meeting)
    spec, device, dtype = checked.spec, options.torch_device, options.torch_dtype
    on_read = _added_up(options.on_read, checked.read_bytes)
    mapped = MappedWeights(checked.files, dtype, device, checked.weight_format, checked.kernels.native, on_read=on_read)
    checked.weight_format.packing.tell = options.on_pack
    with mapped as weights, checked.weight_format.packing:
        decoder = Decoder(weights, tp, spec)
    checked.content.refuse_change(model_dir)
    cache, size = _cache(checked, tp, options), checked.size
    states = StateCache(spec, tp, size.num_states, options.torch_device) if size.num_states else None
    kept = (checked.zones, checked.without_compression, states, checked.num_unpacked)
    content = checked.content.digest.hex()
    return LoadedModel(spec, decoder, cache, checked.kernels, size, content, format_of(options), *kept)


def _added_up(tell: Callable[[int, int], None], of_bytes: int) -> Callable[[int], None]:
    """Returns what adds up the bytes of tensors, and tells how many of all they are."""
    read = 0

    def add(num_bytes: int) -> None:
        nonlocal read
        read += num_bytes
        tell(read, of_bytes)

    return add


def slice_bytes(model_dir: Path, tp: TensorParallel, options: RunnerOptions) -> int:
    """Returns the bytes of weights that `load_model` keeps on this rank, from shapes alone.

    Raises ModelRefused.
    """
    return _check(model_dir, tp, options).weight_bytes


def format_of(options: RunnerOptions) -> Format:
    """Returns the format that is set. Raises ModelRefused where it is to be chosen."""
    if options.quantization == "auto":
        raise ModelRefused("quantization auto: the format is chosen while the model is loaded")
    return options.quantization


def _agreed(model_dir: Path, tp: TensorParallel, options: RunnerOptions) -> _Checked:
    """Returns the check's result once all ranks have checked the model.

    No rank allocates before that: a free-memory figure means nothing while a peer fills the memory.
    """
    refusal: ModelRefused | None = None
    checked: _Checked | None = None
    try:
        checked = _check(model_dir, tp, options)
    except ModelRefused as error:
        refusal = error
    given = [float(refusal is not None), 1.0, *_telling(b"" if checked is None else checked.content.digest)]
    sums = tp.collectives.all_reduce(torch.tensor(given, device=options.torch_device)).tolist()
    if refusal is not None:
        raise refusal
    if checked is None or sums[0] > 0:
        raise ModelRefused("another rank refused the model")
    if not _all_equal(sums[2:], round(sums[1])):
        raise ModelRefused(f"{model_dir}: the ranks read different files: load the model again when they are whole")
    return checked


def _telling(digest: bytes) -> list[float]:
    """Returns the bytes of a digest and their squares, which float32 sums exactly over all ranks."""
    numbers = list(digest.ljust(DIGEST_BYTES, b"\0"))
    return [float(each) for each in (*numbers, *(number * number for number in numbers))]


def _all_equal(sums: Sequence[float], num_ranks: int) -> bool:
    """Returns whether all ranks had the same digest, by what `_telling` adds up to. All ranks find the same."""
    numbers, squares = sums[:DIGEST_BYTES], sums[DIGEST_BYTES:]
    return all(num_ranks * int(square) == int(number) ** 2 for number, square in zip(numbers, squares, strict=True))


def _check(model_dir: Path, tp: TensorParallel, options: RunnerOptions) -> _Checked:
    seen = Seen.of(model_dir)
    spec, files = open_model(model_dir)
    spec = sparsified(spec, options.sparse_attention)
    kernels = open_kernels(options)
    refuse_unfit(options.sparse_attention, options.kv_compression, kernels.reason)
    weight_format = WeightFormat(format_of(options), options.torch_device, options.torch_dtype, kernels.native)
    weights = CheckedWeights(files, options.torch_dtype, weight_format)
    Decoder(weights, tp, spec)
    weights.refuse_unread((*spec.names.ignored, f"{spec.names.head}.weight") if spec.tied_head else spec.names.ignored)
    compression = options.kv_compression
    unfit = "" if compression == "none" else without_compression(spec, kernels.native is not None)
    zones, widest = (
        None if unfit else zones_of(compression, options.kv_hot_tokens, options.block_size, spec, place)
        for place in (tp, tp.widest)
    )
    size = cache_size(spec, tp, _request(options, widest))
    in_c = kernels.native is not None and options.step == "auto"
    steps_bytes = program_bytes(spec, tp.size) if in_c else 0
    _check_memory(model_dir, tp, options, {"weights": weights.nbytes, "steps in C": steps_bytes, "the KV cache": size.nbytes})
    borrowable = 0 if options.without_lending else options.borrow_bytes // size.block_bytes
    content = ModelContent.of(model_dir, (file for _, file in files.places()), seen)
    needed = (weights.nbytes, weights.read_bytes, size)
    return _Checked(spec, files, weight_format, kernels, *needed, content, zones, unfit, borrowable, len(weights.unpacked))


def open_model(model: Path) -> tuple[DecoderSpec, WeightFiles]:
    """Returns the decoder and the tensors of a directory in the Hugging Face layout, or of a GGUF file."""
    if is_gguf(model):
        return open_gguf(model, as_stored=True)
    config = read_config(model)
    spec = spec_of(config)
    makes_vectors = (model / EMBEDDING_MODULES).exists()
    spec = _without_head(spec) if makes_vectors else spec
    entries = with_embedding(spec, with_prefix(read_tensor_files(model), spec.names))
    spec = spec if makes_vectors else untied_where_stored(spec, entries)
    if config.get("quantization_config"):
        return open_quantized(model, config, spec, entries)
    return spec, SafetensorsFiles(model, entries)


def _without_head(spec: DecoderSpec) -> DecoderSpec:
    """Returns the decoder of a model that makes vectors of hidden states.

    Its head, if it has one, is not read. Most are stored as a bare model, without the first part of every name.
    """
    prefix = spec.names.prefix or spec.names.embedding.partition(".")[0] + "."
    return replace(spec, tied_head=True, head_bias=False, names=replace(spec.names, prefix=prefix))


def with_prefix(entries: Mapping[str, TensorEntry], names: WeightNames) -> Mapping[str, TensorEntry]:
    """Returns the entries with full names.

    Checkpoints of a bare model, such as GPT-2's on the hub, lack the first part of every name.
    """
    if not names.prefix or any(name.startswith(names.prefix) for name in entries):
        return entries
    return {names.prefix + name: entry for name, entry in entries.items()}


def _request(options: RunnerOptions, zones: Zones | None) -> CacheRequest:
    return CacheRequest(
        options.num_blocks,
        options.kv_bytes,
        options.block_size,
        options.max_sequences,
        options.max_tokens_per_step,
        options.kv_torch_dtype.itemsize,
        zones,
        options.num_states,
    )


def _cache(checked: _Checked, tp: TensorParallel, options: RunnerOptions) -> KVCache | ZonedCache:
    spec, size, zones = checked.spec, checked.size, checked.zones
    groups, width = layer_groups(spec), slot_width(spec, tp)
    num_blocks, dtype, device = size.num_blocks + checked.borrowable_blocks, options.kv_torch_dtype, options.torch_device
    if zones is None:
        staged = groups.windows == (None,)
        return KVCache(
            *(groups.num_planes, num_blocks, options.block_size, width),
            dtype=dtype,
            device=device,
            staged=staged and not groups.rules,
            bounded=groups.selects,
        )
    hot = KVCache(spec.num_layers, size.hot_pages, options.block_size, width, dtype=dtype, device=device, staged=False)
    return ZonedCache(groups.num_planes, num_blocks, zones.layout.block_bytes, hot)


def _staging(cache: KVCache) -> Staging | None:
    return Staging(cache.num_slots + 1, cache.num_staging, cache.block_size) if cache.num_staging else None


def _check_memory(model_dir: Path, tp: TensorParallel, options: RunnerOptions, needs: Mapping[str, int]) -> None:
    """Raises CheckpointError if memory is short. Ranks on a CPU share it; each GPU has its own."""
    num_sharing = tp.size if options.torch_device.type == "cpu" else 1
    needed, available = sum(needs.values()) * num_sharing, available_bytes(options.torch_device)
    if needed > available:
        parts = ", ".join(f"{nbytes * num_sharing} for {name}" for name, nbytes in needs.items() if nbytes)
        raise CheckpointError(
            f"{model_dir}: {num_sharing} ranks here need {needed} bytes ({parts}), "
            f"{available} bytes are free on {options.device}"
        )
