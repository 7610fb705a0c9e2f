"""What quantization costs: the held-out text's perplexity against the original model's, and the divergence from it.

Legend: W windows, T tokens of a window, E hidden size, N predicted tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.tools.quantize.reading.walk import DecoderHead


@dataclass(frozen=True, slots=True)
class Loss:
    """A relative loss of perplexity, 0.01 for 1 %, and its standard error; the divergence in nats per token."""

    relative: float
    error: float
    divergence: float
    perplexity: float
    original_perplexity: float
    num_tokens: int

    @property
    def upper(self) -> float:
        """The upper end of the 95 % interval."""
        return self.relative + 2 * self.error

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.4f}, {self.original_perplexity:.4f} in full precision: "
            f"{self.relative:+.2%} (standard error {self.error:.2%}), KL {self.divergence:.5f} nats, "
            f"on {self.num_tokens} held-out tokens"
        )


def measured(head: DecoderHead, ids_WT: Tensor, original_WTE: Tensor, quantized_WTE: Tensor) -> Loss:
    """Compares the last hidden states of both models on the same windows."""
    original, quantized, divergence = [], [], []
    for ids_T, original_TE, quantized_TE in zip(ids_WT, original_WTE, quantized_WTE, strict=True):
        next_T = ids_T[1:]
        both = zip(head.log_probabilities(original_TE[:-1]), head.log_probabilities(quantized_TE[:-1]), strict=True)
        for (rows, one_tV), (_, other_tV) in both:
            of_next = next_T[rows].unsqueeze(1)
            original.append(-one_tV.gather(1, of_next))
            quantized.append(-other_tV.gather(1, of_next))
            terms_tV = one_tV.exp().mul_(one_tV.sub_(other_tV))
            divergence.append(terms_tV.nan_to_num_(0.0).sum(dim=1))
    original_N, quantized_N = torch.cat(original).double(), torch.cat(quantized).double()
    difference_N = quantized_N - original_N
    mean = difference_N.mean().item()
    factor = math.exp(min(mean, 700))
    if not math.isfinite(mean):
        factor = math.inf
    return Loss(
        relative=factor - 1,
        error=difference_N.std().item() / math.sqrt(len(difference_N)),
        divergence=torch.cat(divergence).double().mean().item(),
        perplexity=original_N.mean().exp().item() * factor,
        original_perplexity=original_N.mean().exp().item(),
        num_tokens=len(difference_N),
    )
