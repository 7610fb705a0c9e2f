"""How ranks run a model and its queue. The agent makes these values from its settings, ranks get them whole."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.settings.quantization import (
    KERNELS,
    KV_COMPRESSIONS,
    KV_DTYPES,
    QUANTIZATIONS,
    STEPS,
    Kernels,
    KvCompression,
    KvDtype,
    Quantization,
    Step,
)
from ryzanstein.worker.settings.sparse import parse_sparse_attention

DTYPE_NAMES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a rank computes, and the size of its KV cache."""

    dtype: str = "auto"
    """Of weights and arithmetic; auto: float32 on a CPU and bfloat16 on a GPU."""
    kv_dtype: KvDtype = "auto"
    """Of the KV cache; auto: the same as `dtype`."""
    quantization: Quantization = "none"
    """The format in which weights are stored for their products."""
    kernels: Kernels = "auto"
    """native requires our own kernels, torch never uses them."""
    step: Step = "auto"
    """auto runs all layers of a small step in one native call, python runs each in its own."""
    block_size: int = 16
    """Tokens in a block of the KV cache."""
    num_blocks: int | None = None
    """Fixes the size of the KV cache: so many times `block_size` tokens fit in every layer, whatever its window."""
    kv_bytes: int | None = None
    """Bounds the cache of each rank where `num_blocks` is None. Both None: every sequence may be as long as the
    context, up to 1 GiB per rank."""
    num_states: int | None = None
    """Slots for the states that some layers keep instead of keys and values; None: those that `max_sequences` want, up to
    half of the cache."""
    max_sequences: int = 64
    """Sequences in a step."""
    max_tokens_per_step: int = 512
    lends_blocks: bool = False
    """The memory of blocks that are not used returns to the system, for other models of the node."""
    borrow_bytes: int = 0
    """The cache of each rank has room for so much more than its own."""
    kv_compression: KvCompression = "none"
    """Of keys and values that are not among the newest `kv_hot_tokens` of a sequence, where our own kernels run."""
    kv_hot_tokens: int = 16
    sparse_attention: str = ""
    """What layers without a window read, see `settings.sparse`; empty: everything."""

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype {self.dtype!r} is not supported, only auto, {', '.join(DTYPE_NAMES)}")
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
        if self.step not in STEPS:
            raise ValueError(f"step {self.step!r} is not supported, only {', '.join(STEPS)}")
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels {self.kernels!r} is not supported, only {', '.join(KERNELS)}")


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """How requests wait for a place in a step."""

    max_waiting: int = 256
    """Sequences that wait; more are refused."""
    fair: bool = True
    """Tenants of one priority get equal shares; otherwise first come, first served."""
    ttft_objective_s: float = 0.0
    """A group that would wait longer for its first token is refused, in seconds; 0: no objective."""
    tpot_objective_s: float = 0.0
    """Prompts are cut so that steps which decode take no longer, in seconds; 0: no objective."""
