"""Makes the model of transformers over the weights of a base.

transformers gets every tensor under its checkpoint's name and changes names itself. What stays in blocks
it gets as one number that is shown as a whole matrix, which takes no memory: where that number arrives
is where the blocks belong.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ryzanstein.tools.finetune.base.linear import BlocksEmbedding, BlocksLinear, BlocksWeight
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.worker.products.int8 import FillRows, Int8Table
from ryzanstein.worker.refusal import ModelRefused, excerpt

NOT_TRAINED: Mapping[str, str] = MappingProxyType(
    {
        "gpt_oss": "transformers keeps its experts in another order than they are read here",
        "internlm2": "transformers has no class of it",
    }
)
"""Why models of these architectures, which are served, are not trained."""
_EXPERT = re.compile(r"(.*\.\d+(?:\.block_sparse_moe)?\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")


def build(base: Base, *, floats: bool = False, int8: bool = False) -> nn.Module:
    """Returns the model with frozen weights. Raises ModelRefused if transformers has no such model, or another.

    `floats`: all weights become float32, also those that are served in blocks. `int8`: those that a node multiplies
    with `quantization int8` are as they are served then.
    """
    if (why := NOT_TRAINED.get(base.spec.model_type)) is not None:
        raise ModelRefused(f"{base.path}: model_type {base.spec.model_type} is not trained: {why}")
    served = {} if floats else {name: weight for name in base.shapes if (weight := base.served(name)) is not None}
    model, lost = _built(base, served)
    if lost:  # transformers joins them with others: only floats can be joined
        kept = {name: weight for name, weight in served.items() if name not in lost}
        model, lost = _built(base, kept)
    if lost:
        raise ModelRefused(f"{base.path}: transformers has no place for tensor {min(lost)}")
    module: Any
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":  # as it is served, and in NVIDIA's own code
            module.time_step_limit = module.config.time_step_limit
    if int8:
        _round(base, model)
    model.requires_grad_(False)
    return model


def _round(base: Base, model: Any) -> None:
    """Rounds what linear layers multiply, and an embedding that is also the head, to 8 bits as a node does."""
    if base.native is None:
        raise ModelRefused("--quantization int8: there are no native kernels on this machine")
    tables: dict[int, BlocksWeight] = {}
    router = (base.spec.names.router or "").rpartition(".")[2]
    head = model.get_output_embeddings().weight
    for path, module in list(model.named_modules(remove_duplicate=False)):
        weight = module._parameters.get("weight")
        tied = isinstance(module, nn.Embedding) and weight is head
        plain = isinstance(module, nn.Linear) and not isinstance(module, BlocksLinear) and path.rpartition(".")[2] != router
        if weight is not None and (tied or plain):
            if weight.data_ptr() not in tables:
                table = Int8Table.read((weight.shape[0], weight.shape[1]), _rows_of(weight), base.native)
                tables[weight.data_ptr()] = BlocksWeight(table, (weight.shape[0], weight.shape[1]))
            _replace(model, path, _over(module, tables[weight.data_ptr()]))


def _rows_of(weight_OI: Tensor) -> FillRows:
    def fill(first: int, out_RI: Tensor) -> None:
        out_RI.copy_(weight_OI.detach()[first : first + len(out_RI)])

    return fill


def _built(base: Base, served: Mapping[str, BlocksWeight]) -> tuple[nn.Module, set[str]]:
    """Returns the model, and the names of the matrices in blocks that arrived nowhere."""
    state = {name: base.floats(name) if name not in served else _stand_in(base.shapes[name]) for name in base.shapes}
    _join_experts(state)
    places = {tensor.data_ptr(): served[name] for name, tensor in state.items() if name in served}
    names = {tensor.data_ptr(): name for name, tensor in state.items() if name in served}
    model = _loaded(base, state)
    found: set[int] = set()
    for path, module in list(model.named_modules(remove_duplicate=False)):
        weight = module._parameters.get("weight")
        if weight is not None and (place := weight.data_ptr()) in places:
            found.add(place)
            _replace(model, path, _over(module, places[place]))
    return model, {names[place] for place in places if place not in found}


def _stand_in(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(1).expand(shape)


def _join_experts(state: dict[str, Tensor]) -> None:
    """Puts the matrices of all experts of a layer into one tensor, as transformers has Granite's and Gemma 4's."""
    found: dict[str, dict[str, list[Tensor]]] = {}
    for name in [name for name in state if _EXPERT.fullmatch(name)]:
        match = _EXPERT.fullmatch(name)
        assert match is not None, "it matched"
        found.setdefault(match[1], {}).setdefault(match[2], []).append(state.pop(name))
    for experts, projections in found.items():
        pairs = zip(projections["gate_proj"], projections["up_proj"], strict=True)
        state[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        state[f"{experts}.down_proj"] = torch.stack(projections["down_proj"])


def _over(module: nn.Module, served: BlocksWeight) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return BlocksEmbedding(served, module)
    if isinstance(module, nn.Linear):
        return BlocksLinear(served, module.bias)
    raise ModelRefused(f"transformers multiplies weights in blocks by a {type(module).__name__}, which is not supported")


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _loaded(base: Base, state: dict[str, Tensor]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as reports

    values = {key: _plain(key, value) for key, value in base.config.items()}
    model_type = values.pop("model_type")
    reports.disable_progress_bar()  # type: ignore[no-untyped-call]
    with _without_reports():
        try:
            config = AutoConfig.for_model(model_type, **values)
            kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
        except (KeyError, ValueError) as error:
            raise ModelRefused(
                f"{base.path}: transformers has no model of model_type {excerpt(model_type)}, so it is not trained"
            ) from error
        model, found = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    _refuse_different(base, found)
    model.name_or_path = model.config.name_or_path = str(base.path.resolve())
    return _as_module(model)


def _plain(key: str, value: Any) -> Any:
    """Returns a value of config.json as its class takes it. Nothing is left to chance: a training can be repeated."""
    if ("drop" in key or "jitter" in key) and isinstance(value, float):
        return 0.0
    if isinstance(value, dict) and value.keys() == {"__float__"}:  # how transformers writes an infinity
        return float(value["__float__"])
    return [_plain("", each) for each in value] if isinstance(value, list) else value


def _as_module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def _refuse_different(base: Base, found: Mapping[str, Any]) -> None:
    """Raises ModelRefused unless transformers has used every tensor and lacks none."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, found.get(what) or ())):
            raise ModelRefused(f"{base.path}: transformers reads this model differently: {what} {excerpt(names)}")


@contextmanager
def _without_reports() -> Iterator[None]:
    """Keeps transformers from printing a table of what it loaded."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
