"""Gemma's windows, bases of rotation and scale of scores, of which a file says little or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import shown

_THETA, _LOCAL_THETA = 1e6, 1e4


@dataclass(frozen=True, slots=True)
class GemmaWindows:
    """One layer in `period` has no window. A file may lack the window only if `usual` is not 0.

    Scores of the largest model, which has `largest` layers, are scaled by its width, not by a
    head's. With `bases`, layers with windows rotate by a base of their own.
    """

    period: int
    usual: int
    largest: int
    bases: bool = False

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what llama.cpp assumes where the file says nothing."""
        num_layers, period = config["num_hidden_layers"], self._period(reader)
        by_width = config["hidden_size"] // config["num_attention_heads"]
        found: dict[str, Any] = {
            "query_pre_attn_scalar": by_width if num_layers == self.largest else config["head_dim"],
            "sliding_window": reader.count("attention.sliding_window", self.usual),
            "layer_types": [
                "full_attention" if (index + 1) % period == 0 else "sliding_attention" for index in range(num_layers)
            ],
        }
        if self.bases:
            found["rope_theta"] = reader.number("rope.freq_base", _THETA)
            found["rope_local_base_freq"] = reader.number("rope.freq_base_swa", _LOCAL_THETA)
        if not found["sliding_window"]:
            reader.refuse("attention.sliding_window", "is missing")
        return found

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        window = next((window for window in spec.windows if window is not None), None)
        return {} if window is None else {"attention.sliding_window": window}

    def _period(self, reader: MetadataReader) -> int:
        stored = reader.facts.metadata.get(f"{reader.name}.attention.sliding_window_pattern", self.period)
        if isinstance(stored, bool) or not isinstance(stored, int) or stored < 1:
            reader.refuse("attention.sliding_window_pattern", f"{shown(stored)} is not supported, only a number of layers")
        return int(stored)
