"""How much memory a model takes on this node, known before anything is loaded.

Read from config.json and the headers of the weights, or from those of a GGUF file, without torch and
without reading a weight. The result is an upper bound: what the ranks keep, and what they need
beside it while they load, or while they run the largest steps.

Legend: O outputs, I inputs of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ryzanstein import errors
from ryzanstein.files.model_paths import is_gguf
from ryzanstein.worker import devices
from ryzanstein.worker.architectures.registry import read_config, spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.cache.sizes import CacheRequest, CacheSize, cache_size, slot_width
from ryzanstein.worker.cache.staging import BUDGET_BYTES, GPU_VIEW_BYTES
from ryzanstein.worker.cache.state_sizes import state_bytes
from ryzanstein.worker.cache.zones import Zones, without_compression, zones_of
from ryzanstein.worker.checkpoints.gguf.description import GgufDescription
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.checkpoints.quantized_files.sizes import KEPT, unpacked_entries
from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry
from ryzanstein.worker.checkpoints.tensor_files import read_tensor_files
from ryzanstein.worker.checkpoints.weight_files import weight_files
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.model.program.sizes import program_bytes
from ryzanstein.worker.model.sparse_layers import sparsified
from ryzanstein.worker.refusal import ModelRefused, UnevenSplit
from ryzanstein.worker.settings.quantization import Format

if TYPE_CHECKING:
    from ryzanstein.worker.collectives import Collectives

RANK_BYTES = 200 * 2**20
"""What a rank on a CPU takes without a model: Python, torch and the libraries' own memory.

Measured as `resident.private_bytes` of ranks of the demo model (7 MiB of weights) and of one of 100 M
parameters, less weights and cache: 162 to 182 MiB. It includes 147 MiB that a rank begins with and
shares with its fork server until it writes to them.
"""
STREAM_BYTES = 16 * 2**20
"""What the node itself keeps of the answers of a server beside it, about."""
DEVICE_BYTES = 768 * 2**20
"""What a rank takes on its GPU beside weights and cache: the context and workspaces of products, 687 MiB on an H200."""
_SLACK = 0.1  # of the weights, which the allocator does not give back
_TWICE_NUMBERS = 4 * 2**20  # 8-bit weights up to this size may be kept in two packings
_COPIED_BYTES = 8 * 2**20  # tied heads up to this size are copied
_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "TQ2_0")  # GGUF's types that products keep
_PADDING = 0.05  # of blocks, to whole panels
_LANES = 64  # packed weights have whole groups of outputs
_HALF_INPUTS = 512  # and, packed by FBGEMM, of inputs
_INT8_OUTPUT_BYTES = 8
_WEIGHTS_AT_ONCE = 6  # freed memory of so many weights may wait for reuse while a model loads
_STATES = 8  # of the hidden size that a layer has at once
_LOGITS = 3  # copies of a step's logits while tokens are drawn


def need_of(directory: Path, settings: WorkerSettings) -> int:
    """Returns the bytes that all ranks together take to serve the model in this directory.

    A server beside the node has memory of its own, for the one model that it serves. Raises
    FAILED_PRECONDITION with the name of the file, or the numbers, that do not fit.
    """
    if not settings.has_ranks:
        if settings.model and Path(settings.model) != directory:
            raise errors.failed_precondition("MODEL_REFUSED", f"the engine {settings.engine} serves {settings.model} alone")
        if settings.starts_engine:
            return STREAM_BYTES + math.ceil(sum(path.stat().st_size for path in weight_files(directory)) * (1 + _SLACK))
        return STREAM_BYTES
    try:
        return MemoryNeed.of(directory, settings).total_bytes
    except ModelRefused as error:
        raise errors.failed_precondition("MODEL_REFUSED", str(error)) from error
    except OSError as error:
        raise errors.failed_precondition("MODEL_REFUSED", f"{directory}: {error.strerror}") from error


def node_memory_bytes(settings: WorkerSettings) -> int:
    """Returns the default of `model_memory_bytes`: the memory that this node has for models."""
    if _on_gpu(settings):
        return devices.gpu_memory_bytes(settings.tp * settings.num_models)
    return devices.machine_memory_bytes()


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model takes, by what takes it. Sizes are in bytes, of all ranks together. All ranks take the same."""

    spec: DecoderSpec
    entries: Mapping[str, TensorEntry]
    settings: WorkerSettings
    on_gpu: bool
    is_quantized: bool

    @classmethod
    def of(cls, directory: Path, settings: WorkerSettings) -> MemoryNeed:
        sparse = settings.sparse_attention
        if is_gguf(directory):
            spec, entries = _gguf(directory)
            return cls(sparsified(spec, sparse), entries, settings, _on_gpu(settings), is_quantized=True)
        config, entries = read_config(directory), read_tensor_files(directory)
        quantized = bool(config.get("quantization_config"))
        spec = sparsified(spec_of(config), sparse)
        return cls(spec, unpacked_entries(config, entries), settings, _on_gpu(settings), is_quantized=quantized)

    @property
    def total_bytes(self) -> int:
        return self.rank_bytes + self.weight_bytes + self.peak_bytes

    @property
    def num_parameters(self) -> int:
        """The numbers that are stored."""
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    @property
    def stored_bytes(self) -> int:
        """The size of the tensors in the files."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def rank_bytes(self) -> int:
        """The processes of the ranks without a model."""
        return self.settings.tp * (DEVICE_BYTES if self.on_gpu else RANK_BYTES)

    @property
    def weight_bytes(self) -> int:
        return math.ceil(self._kept_weight_bytes() * (1 + _SLACK))

    @property
    def peak_bytes(self) -> int:
        """What is needed beside the weights: while they load, or for the cache and the largest steps."""
        loads = self._loading_bytes() if not self.on_gpu else 0
        return max(loads, self.cache_bytes + self._step_bytes())

    def possible_tp(self, at_most: int) -> list[int]:
        """Returns the numbers of ranks of which each has a head and columns of the MLP."""
        return [size for size in range(1, at_most + 1) if self._divides(size)]

    def _divides(self, size: int) -> bool:
        tp = TensorParallel(0, size, cast("Collectives", None))
        try:
            tp.heads(self.spec.num_heads, self.spec.num_kv_heads, apart=self.spec.heads_apart)
            state_bytes(self.spec, tp)
            tp.columns(self.spec.intermediate_size)
        except UnevenSplit:
            return False
        return True

    @property
    def _item_bytes(self) -> int:
        if self.settings.dtype == "auto":
            return 2 if self.on_gpu else 4
        return 4 if self.settings.dtype == "float32" else 2

    @property
    def _quantization(self) -> Format:
        """The format of products; where it is chosen, the largest that it may become for numbers of 16 bits."""
        if self.settings.quantization != "auto":
            return self.settings.quantization
        return "none" if self.is_quantized or not self._in_float32 else "fp16"

    @property
    def _in_float32(self) -> bool:
        return self._item_bytes == 4 and not self.on_gpu

    @property
    def _tp(self) -> TensorParallel:
        return TensorParallel(0, self.settings.tp, cast("Collectives", None))  # only sizes are asked for

    def _kept_weight_bytes(self) -> int:
        """Returns the bytes of all ranks' weights.

        Matrices are divided over the ranks. Norms, biases and what every rank needs whole are not.
        A tied head that is stored all the same may differ from the embedding, and counts.
        """
        total = 0
        for name, entry in self.entries.items():
            total += self._copies(name, entry) * self._kept_bytes(name, entry)
        if self.spec.tied_head and self._stored(self.spec.names.head) is None:
            total += self._tied_head_bytes()
        return total

    def _stored(self, name: str) -> TensorEntry | None:
        """Returns a weight by its name, which may lack the first part (see `WeightNames.prefix`)."""
        full = f"{name}.weight"
        return self.entries.get(full) or self.entries.get(full.removeprefix(self.spec.names.prefix))

    def _copies(self, name: str, entry: TensorEntry) -> int:
        """Returns on how many ranks each number of a tensor is."""
        names, num_ranks = self.spec.names, self.settings.tp
        if len(entry.shape) < 2 or any(part and part in name for part in (names.latent, names.query_latent, names.router)):
            return num_ranks
        if names.position and names.position in name:
            return num_ranks
        if num_ranks > self.spec.num_kv_heads and any(part in name for part in (names.key, names.value)):
            return -(-num_ranks // self.spec.num_kv_heads)
        return 1

    def _kept_bytes(self, name: str, entry: TensorEntry) -> int:
        if self._keeps_blocks(entry):
            return math.ceil(entry.num_bytes * (1 + _PADDING))
        if self.spec.names.embedding in name and self._keeps_table:
            return self._product_bytes(entry)
        embeds = any(part and part in name for part in (self.spec.names.embedding, self.spec.names.position))
        if len(entry.shape) < 2 or embeds:
            return math.prod(entry.shape) * self._item_bytes
        return self._product_bytes(entry)

    def _product_bytes(self, entry: TensorEntry) -> int:
        """Returns what a product with this weight keeps, in the largest of the formats it may get."""
        num_numbers, num_inputs = math.prod(entry.shape), max(1, entry.shape[-1])
        num_outputs = num_numbers // num_inputs + _LANES * self.settings.tp
        match self._quantization:
            case "int8":
                packings = 2 if num_numbers // self.settings.tp <= _TWICE_NUMBERS else 1
                return packings * num_outputs * (num_inputs + _INT8_OUTPUT_BYTES)
            case "fp16":
                return num_outputs * -(-num_inputs // _HALF_INPUTS) * _HALF_INPUTS * 2
        return num_outputs * num_inputs * self._item_bytes

    def _tied_head_bytes(self) -> int:
        """Returns what a head that is tied to the embedding keeps beside it."""
        entry = self._stored(self.spec.names.embedding)
        if entry is None or self._keeps_table:
            return 0
        copied = math.prod(entry.shape) * self._item_bytes // self.settings.tp < _COPIED_BYTES
        return self._product_bytes(entry) if copied or self._quantization != "none" else 0

    @property
    def _keeps_table(self) -> bool:
        """Whether an embedding that is also the head is in memory once, in 8 bits."""
        chosen = self._quantization == "int8" and self.settings.kernels != "torch" and not self.on_gpu
        return chosen and self.spec.tied_head and self._stored(self.spec.names.head) is None

    def _loading_bytes(self) -> int:
        """Returns the memory of weights that are not packed yet, or of which the memory waits for reuse."""
        blocks = max((entry.num_bytes for entry in self.entries.values() if self._keeps_blocks(entry)), default=0)
        sizes = (math.prod(entry.shape) for entry in self.entries.values() if not self._keeps_blocks(entry))
        return blocks + sum(nlargest(_WEIGHTS_AT_ONCE, sizes)) * self._item_bytes

    def _keeps_blocks(self, entry: TensorEntry) -> bool:
        """Returns whether a tensor is kept in blocks."""
        native = self._in_float32 and self.settings.kernels != "torch"
        return entry.dtype in (*_BLOCKS, KEPT) and self._quantization == "none" and native

    @property
    def cache_bytes(self) -> int:
        """The KV caches of all ranks, as `kv_cache.KVCache` allocates them."""
        settings, spec, tp = self.settings, self.spec, self._tp
        zones, groups = self._zones, layer_groups(spec)
        kept, item_bytes = self.cache_size(), self._kv_item_bytes
        padding = (groups.num_planes if zones is None else spec.num_layers) * slot_width(spec, tp) * item_bytes
        padding += 2 * kept.state_bytes  # slots of zeros and for what nobody reads
        stages = not self.on_gpu and groups.windows == (None,) and zones is None
        largest = kept.nbytes + padding + (min(kept.nbytes, BUDGET_BYTES) if stages else 0)
        widths = [slot_width(spec, replace(self._tp, rank=rank)) for rank in range(settings.tp)]
        return math.ceil(largest * sum(widths) / widths[0])

    @property
    def _kv_item_bytes(self) -> int:
        return 2 if self.settings.kv_dtype == "float16" else self._item_bytes

    def cache_size(self) -> CacheSize:
        """Returns the size of one rank's KV cache. Raises ModelRefused if not one page of all layers fits."""
        settings = self.settings
        request = CacheRequest(
            settings.num_blocks or None,
            settings.kv_bytes or None,
            settings.block_size,
            settings.max_sequences,
            settings.max_tokens_per_step,
            self._kv_item_bytes,
            self._zones,
            settings.tuning.kv_states or None,
        )
        return cache_size(self.spec, self._tp, request)

    @property
    def _zones(self) -> Zones | None:
        settings = self.settings
        if without_compression(self.spec, self._in_float32 and settings.kernels != "torch"):
            return None
        return zones_of(settings.kv_compression, settings.tuning.kv_hot_tokens, settings.block_size, self.spec, self._tp)

    def _step_bytes(self) -> int:
        """Returns what the largest steps take beside weights and cache."""
        settings, spec = self.settings, self.spec
        wide = (2 * spec.intermediate_size + 3 * spec.num_heads * spec.head_dim) // settings.tp
        states = settings.max_tokens_per_step * (_STATES * spec.hidden_size + wide) * 4
        logits = settings.max_sequences * spec.vocab_size * 4 * _LOGITS
        # torch's 16-bit products on a CPU convert and reorder the weight in each call.
        largest = max((math.prod(entry.shape) for entry in self.entries.values()), default=0)
        reordered = 2 * largest * self._item_bytes if self._item_bytes == 2 and not self.on_gpu else 0
        copied = settings.max_sequences * GPU_VIEW_BYTES if self.on_gpu else 0
        return settings.tp * (states + copied + self._program_bytes()) + logits + reordered

    def _program_bytes(self) -> int:
        """Returns what a rank keeps for steps in C."""
        settings = self.settings
        in_c = self._in_float32 and settings.kernels != "torch" and settings.step == "auto"
        return program_bytes(self.spec, settings.tp) if in_c else 0


def _gguf(path: Path) -> tuple[DecoderSpec, Mapping[str, TensorEntry]]:
    """Returns the decoder and the tensors of a GGUF file, under the names of the file."""
    with GgufFile.open(path) as file:
        spec = spec_of(GgufDescription.of(file).config)
        return spec, {
            each.name: TensorEntry(each.name, path, each.shape, each.type.name, 0, len(each.blocks))
            for each in file.tensors.values()
        }


def _on_gpu(settings: WorkerSettings) -> bool:
    return devices.device_of_node(settings.device, settings.tp, settings.num_models).device == "cuda"
