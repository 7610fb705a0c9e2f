"""What a model costs whoever runs it: the bytes that a decode step reads, and the memory to stay within."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.files.model_paths import is_gguf
from ryzanstein.lab.bench.engine.peers.contenders import GGUF, Label, Site, label_of, own_label
from ryzanstein.lab.bench.engine.scaling.work import DenseModel, Step
from ryzanstein.worker.architectures.registry import read_spec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.cache.sizes import bytes_of_block
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.gguf_files import open_gguf
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.refusal import CheckpointError

PROCESS_BYTES = 150_000_000
"""What a process may take besides the file and the keys and values."""

_WEIGHT_BYTES = {"none": 4, "fp16": 2, "int8": 1}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Figures of one contender.

    `step_bytes`: the weights that a step of one sequence reads; keys and values are not counted.
    `memory_bound_bytes`: a GGUF file's size, plus its whole KV cache, plus `PROCESS_BYTES`. None:
    the figure does not exist.
    """

    step_bytes: float | None
    memory_bound_bytes: int | None = None


def footprints(specs: Sequence[RankSpec], site: Site) -> Mapping[Label, Footprint]:
    """Returns the footprints of our configurations, and of peers that read the same file."""
    own = {own_label(spec): _own(spec) for spec in specs}
    of_file = Footprint(file_step_bytes(site.model)) if is_gguf(site.model) else Footprint(None)
    return own | {label_of(peer): of_file for peer in site.peers if peer.quantization == GGUF}


def spec_of_model(model: Path) -> DecoderSpec:
    """Returns the decoder of a directory or a GGUF file. Raises MODEL_INVALID."""
    try:
        if not is_gguf(model):
            return read_spec(model)
        spec, files = open_gguf(model)
        files.close()
        return spec
    except CheckpointError as error:
        raise errors.failed_precondition("MODEL_INVALID", f"{model}: {error}") from error


def file_step_bytes(path: Path) -> int:
    """Returns the bytes of a file's tensors, without an embedding whose rows are only looked up."""
    with GgufFile.open(path) as file:
        looked_up = {_EMBEDDING} if _HEAD in file.tensors else set()
        return sum(len(tensor.blocks) for name, tensor in file.tensors.items() if name not in looked_up)


def _own(spec: RankSpec) -> Footprint:
    model = Path(spec.model)
    if own_label(spec).quantization != GGUF:
        return Footprint(_step_bytes(spec_of_model(model), spec.settings.quantization))
    kv_bytes = _cache_bytes(spec_of_model(model), spec)
    return Footprint(file_step_bytes(model), model.stat().st_size + kv_bytes + PROCESS_BYTES)


def _step_bytes(spec: DecoderSpec, quantization: str) -> float | None:
    """Returns None for experts and latents, and for weights of several sizes."""
    if quantization not in _WEIGHT_BYTES:
        return None
    try:
        return DenseModel(spec, _WEIGHT_BYTES[quantization], 0).work(Step.decode(1, 0), 1).read_bytes
    except RyzansteinError:
        return None


def _cache_bytes(decoder: DecoderSpec, spec: RankSpec) -> int:
    """Returns the size of the KV caches of all ranks."""
    tp = TensorParallel(0, spec.tp, LocalCollectives())
    item_bytes = 2 if spec.settings.kv_dtype == "float16" else 4
    num_blocks = (spec.settings.num_blocks or 0) * len(layer_groups(decoder).windows)
    return spec.tp * num_blocks * bytes_of_block(decoder, tp, spec.settings.block_size, item_bytes)
