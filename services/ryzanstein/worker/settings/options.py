"""How a rank runs its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ryzanstein.worker.settings.quantization import (
    KERNELS,
    KV_COMPRESSIONS,
    KV_DTYPES,
    QUANTIZATIONS,
    Kernels,
    KvCompression,
    KvDtype,
    Quantization,
)
from ryzanstein.worker.settings.sparse import parse_sparse_attention

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """The options of a rank's model.

    `device` is torch's name of it. `dtype` auto is float32 on a CPU and bfloat16 on a GPU;
    `kv_dtype` auto is the same as `dtype`. `num_blocks` fixes the size of the KV cache: so many
    times `block_size` tokens fit in every layer, whatever its window. Without it
    `kv_bytes` bounds the cache of each rank. Without both, the cache lets every sequence be as long
    as the context, up to 1 GiB per rank. `num_threads` None keeps torch's own choice.
    `quantization` is the format in which weights are stored for their products. `kernels` native
    requires our own kernels, torch never uses them. `compiles_kernels`: they may be compiled now,
    which takes up to a minute; ranks use what their agent has had compiled. `lends_blocks`: the memory of blocks that are
    not used returns to the system; the cache has room for `borrow_bytes` more than its own.
    `kv_compression`: keys and values that are not among the newest `kv_hot_tokens` are compressed,
    where our own kernels run. `sparse_attention`: what layers without a window read, see
    `worker.sparse`; empty: everything. `on_read` is called after each tensor that was read: loading
    goes on.
    """

    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_bytes: int | None = None
    max_sequences: int = 32
    max_tokens_per_step: int = 512
    num_threads: int | None = None
    kv_dtype: KvDtype = "auto"
    quantization: Quantization = "none"
    kernels: Kernels = "auto"
    compiles_kernels: bool = True
    lends_blocks: bool = False
    borrow_bytes: int = 0
    kv_compression: KvCompression = "none"
    kv_hot_tokens: int = 16
    sparse_attention: str = ""
    on_read: Callable[[], None] = _nothing

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not supported, only auto, {', '.join(DTYPES)}")
        if self.borrow_bytes < 0 or (self.borrow_bytes and not self.lends_blocks):
            raise ValueError(f"borrow_bytes {self.borrow_bytes} must be at least 0, and 0 without lends_blocks")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is not supported, only {', '.join(KV_DTYPES)}")
        if self.kv_compression not in KV_COMPRESSIONS:
            raise ValueError(f"kv_compression {self.kv_compression!r} is not supported, only {', '.join(KV_COMPRESSIONS)}")
        if self.kv_hot_tokens < 16:
            raise ValueError(f"kv_hot_tokens must be at least 16: {self.kv_hot_tokens}")
        parse_sparse_attention(self.sparse_attention)
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization {self.quantization!r} is not supported, only {', '.join(QUANTIZATIONS)}")
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels {self.kernels!r} is not supported, only {', '.join(KERNELS)}")

    @property
    def without_lending(self) -> str:
        """Says why blocks can neither be borrowed nor lent; empty if they can."""
        if not self.lends_blocks:
            return "it is not enabled"
        if self.torch_device.type != "cpu":
            return f"a cache on {self.torch_device.type} is one allocation, whose parts cannot be returned"
        return ""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device.type == "cuda" else torch.float32
        return DTYPES[self.dtype]

    @property
    def kv_torch_dtype(self) -> torch.dtype:
        """The dtype of the cache's keys and values."""
        return self.torch_dtype if self.kv_dtype == "auto" else DTYPES[self.kv_dtype]
