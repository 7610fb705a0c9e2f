"""Prints docs/reference/architectures.md, the list of served models, from the tables that decoders are built from."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

from ryzanstein.tools.conversations import CONVERSATIONS
from ryzanstein.worker.architectures.config import ACTIVATIONS, Architecture, Flag
from ryzanstein.worker.architectures.foreign import QUANT_METHODS
from ryzanstein.worker.architectures.registry import ARCHITECTURES
from ryzanstein.worker.architectures.rotary.config import SCALINGS
from ryzanstein.worker.architectures.text_half import MULTIMODAL
from ryzanstein.worker.architectures.values import MAX_COUNT, MAX_LAYERS
from ryzanstein.worker.checkpoints.gguf.dialects.table import DIALECTS

_HEADER = (
    "`model_type`",
    "Models",
    "Positions",
    "Attention",
    "Norms",
    "Halves of a layer",
    "MLP",
    "Besides",
    "Served only with",
    "Calls, reasoning",
)
_QK_NORMS = {
    "shared": "QK norms",
    "heads": "QK norms, one for each head",
    "head_list": "QK norms, one for each head",
    "width": "QK norms over all heads",
}
_INTRODUCTION = """# Architectures

Generated from `services/ryzanstein/worker/architectures` by `python -P -m ryzanstein.lab.reference`.

A checkpoint is a directory with `config.json` and safetensors files, as transformers saves it. One decoder serves all of them;
a row of this table is all that distinguishes an architecture. Unless it says otherwise, positions are rotary, and a norm is
before each half of a layer. Each is tested against transformers, on one rank and on two.
The last column has the [formats](../build/tools.md#families) of a tested conversation; `text only` gets the generic one.
"""


def page() -> str:
    """Returns the whole page, in Markdown."""
    rows = [_row(architecture) for _, architecture in sorted(ARCHITECTURES.items())]
    files = "[GGUF files](../operate/quantize-and-convert.md#ggufs-architectures)"
    unread = sorted(ARCHITECTURES.keys() - {dialect.model_type for dialect in DIALECTS})
    read = f"They are also read from {files}, but for {_list(unread)}.\n"
    table = [_line(_HEADER), _line("---" for _ in _HEADER), *map(_line, rows)]
    return "\n".join([_INTRODUCTION + read, *table, "", *_notes(), ""])


def _notes() -> list[str]:
    return [
        "## Options",
        "",
        f"- Activations: {_list(ACTIVATIONS)}.",
        f"- Scaling of rotary positions: {_list(SCALINGS)}.",
        "  Both spellings of config.json load, `rope_parameters` and `rope_theta` with `rope_scaling`. Where both are there,",
        "  `rope_scaling` counts, as in transformers.",
        "- With `yarn` the context is `original_max_position_embeddings` times `factor`, with `linear` it is",
        "  `max_position_embeddings` times `factor`, as vLLM reads them;",
        "  with `llama3`, and for Gemma 3, `max_position_embeddings` has the factor in it.",
        "- With `dynamic` the context ends at `max_position_embeddings`, before which it changes nothing. With `longrope`",
        "  it ends at `original_max_position_embeddings`: beyond it all keys of a sequence would change, cached ones cannot.",
        "- Nothing needs to divide over the ranks. Key-value heads are dealt whole, with their queries; with fewer of them",
        "  than ranks, several ranks hold one and divide its queries. Each rank needs an attention head, with short",
        "  convolutions a key-value head, and with a delta rule a key head of it. Latents are whole on every rank: there the",
        "  cache of a token is not divided.",
        "- Anything else is refused by its name in config.json, and so is a tensor that no layer reads.",
        "",
        "## What of config.json counts",
        "",
        "A key means what it means to transformers 5. The tests change every key of every config class, one at a time, and",
        "compare the logits: they change as those of transformers, or the model is refused. So what transformers overlooks for",
        "an architecture is overlooked here, even where the key has a meaning for another one:",
        "",
        *(f"- `{key}`: {_most(names)}" for key, names in sorted(_overlooked().items())),
        "",
        "For all architectures:",
        "",
        "- What matters to training, generation or storage alone (dropout, `initializer_range`, `use_cache`, `dtype`, labels)",
        "  is not read. Of the ids of tokens `eos_token_id` is: an id of the vocabulary, or a list of them.",
        "- Null is absent where transformers has a default for it, but not true where the default is true.",
        "- A head that is stored counts before one that is tied: where `tie_word_embeddings` is true and the file has another",
        "  head than the embedding, the stored one is used. Both are read once to compare them.",
        "- Of a pair that is tied and stored once, either name is read.",
        f"- Of multimodal models of the types {_list(MULTIMODAL)} the text half is served, as far as",
        "  its own type is in the table; images are refused as parts of messages, and the tensors for them are not read.",
        "- `is_causal` false, `per_layer_config` but Gemma 4's, and other multimodal models (a `text_config`) are refused,",
        f"  and so is a `quantization_config` other than {_list(QUANT_METHODS)}",
        "  ([quantization](../operate/quantize-and-convert.md)).",
        f"- Counts are at most {MAX_COUNT}, layers at most {MAX_LAYERS}. Numbers are finite.",
    ]


def _most(names: Sequence[str]) -> str:
    """Returns the architectures, or all but those that are missing, whichever is shorter."""
    missing = sorted(ARCHITECTURES.keys() - set(names))
    return _list(names) if len(names) <= len(missing) else f"all but {_list(missing)}"


def _overlooked() -> dict[str, list[str]]:
    """Returns the architectures that ignore a key, by key."""
    found: dict[str, list[str]] = {}
    for name, architecture in sorted(ARCHITECTURES.items()):
        for key in _overlooked_keys(architecture):
            found.setdefault(key, []).append(name)
    return found


def _overlooked_keys(architecture: Architecture) -> Iterator[str]:
    choices = architecture.choices
    yield from architecture.fixed
    if choices.windowed is not None and not choices.layer_types:
        yield "layer_types"
    if choices.positions == "rotary":
        yield from ("rotary_dim",) if choices.rotated != "count" else ("rope_parameters", "rope_scaling", "rope_theta")
        yield from ("partial_rotary_factor",) if choices.rotated != "factor" else ()


def _row(architecture: Architecture) -> tuple[str, ...]:
    return (
        f"`{architecture.model_type}`",
        architecture.title,
        _positions(architecture),
        _attention(architecture),
        _norms(architecture),
        _halves(architecture),
        _mlp(architecture),
        architecture.refined,
        ", ".join(f"`{key}` {_value(only)}" for key, only in architecture.required.items()),
        _list(filter(None, CONVERSATIONS[architecture.model_type]))
        if architecture.model_type in CONVERSATIONS
        else "text only",
    )


def _positions(architecture: Architecture) -> str:
    choices = architecture.choices
    if choices.positions == "rotary":
        return _where("neighbours paired", choices.interleaved)
    return "ALiBi" if choices.positions == "alibi" else choices.positions


def _attention(architecture: Architecture) -> str:
    choices = architecture.choices
    parts = [
        {"split": "", "stacked": "fused", "grouped": "fused by group"}[choices.qkv_layout],
        "over latents" if architecture.names.latent else "",
        "short convolutions in some layers" if architecture.names.convolution else "",
        "gated, a gated delta rule in most layers" if architecture.names.delta else "",
        "with Mamba 2" if architecture.names.mamba else "",
        _where("biases", choices.qkv_bias),
        _where(_QK_NORMS[choices.qk_norm], choices.qk_normed) if choices.qk_norm else "",
        "windows" if choices.windowed else "",
    ]
    return ", ".join(filter(None, parts))


def _norms(architecture: Architecture) -> str:
    choices = architecture.choices
    if choices.norm == "rms":
        return "RMS, scale less one" if choices.norm_plus_one else "RMS"
    return f"layer{'' if choices.norm_weight else ', no scale'}{', biases' if choices.norm_bias else ''}"


def _halves(architecture: Architecture) -> str:
    names, parallel = architecture.names, architecture.choices.parallel
    if parallel:
        return _where("in parallel", parallel)
    if names.attention_post_norm is None:
        return ""
    return "norm after" if names.attention_norm is None else "norm before and after"


def _mlp(architecture: Architecture) -> str:
    names = architecture.names
    if names.router is not None:
        return "experts and a shared one" if names.shared_expert else "experts"
    return ", ".join(
        filter(None, ["no gate" if names.gate is None else "gated", _where("biases", architecture.choices.mlp_bias)])
    )


def _where(what: str, flag: Flag) -> str:
    """Returns `what`, with a condition if config.json decides, or "" if it is never there."""
    return f"{what} where `{flag}`" if isinstance(flag, str) else what if flag else ""


def _value(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else f"`{value}`"


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="ryzanstein models architectures", description="List the architectures that are served."
    ).parse_args()
    print(page(), end="")
