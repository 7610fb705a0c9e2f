"""The loss on the tokens that are learned. Logits exist of these alone, and of some of them at a time.

Legend: N rows of a batch, T tokens of a row, R tokens that are learned, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ryzanstein.tools.finetune.data.batches import IGNORED

_LOGITS_BYTES = 2**28
"""Of the logits that exist at a time; beside them are their gradients, as large."""

Head = Callable[[Tensor], Tensor]


class _LossInParts(torch.autograd.Function):
    """The sum of the losses of all rows. Each part's gradient is computed with it, so that its logits can go at once."""

    @staticmethod
    def forward(ctx: Any, hidden_RE: Tensor, targets_R: Tensor, head: Head, rows: int) -> Tensor:
        gradient_RE, total = torch.empty_like(hidden_RE), hidden_RE.new_zeros(())
        for first in range(0, len(targets_R), rows):
            part = slice(first, first + rows)
            with torch.enable_grad():
                some_RE = hidden_RE[part].detach().requires_grad_()
                loss = _summed(head(some_RE), targets_R[part])
            (gradient_RE[part],) = torch.autograd.grad(loss, some_RE)
            total += loss.detach()
        ctx.save_for_backward(gradient_RE)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_RE,) = ctx.saved_tensors
        return gradient_RE * gradients[0], None, None, None


def _summed(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    return F.cross_entropy(logits_RV.float(), targets_R, reduction="sum")


def summed_loss(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns the sum of the losses of the tokens that are learned in a batch.

    `model` is a causal model of transformers. Its own forward makes logits of hidden states, with whatever
    it does to them.
    """
    labels_NT = inputs["shift_labels"]
    given = {key: inputs[key] for key in ("input_ids", "position_ids") if key in inputs}
    found = model.get_decoder()(**given, use_cache=False)
    learned_NT = labels_NT != IGNORED
    hidden_RE, targets_R = found[0][learned_NT], labels_NT[learned_NT]
    rows = max(1, _LOGITS_BYTES // (4 * int(model.config.vocab_size)))
    head = _head_of(model, found)
    if torch.is_grad_enabled():
        total: Tensor = _LossInParts.apply(hidden_RE, targets_R, head, rows)  # type: ignore[no-untyped-call]
        return total
    parts = range(0, len(targets_R), rows)
    losses = [_summed(head(hidden_RE[first : first + rows]), targets_R[first : first + rows]) for first in parts]
    return torch.stack(losses).sum() if losses else hidden_RE.new_zeros(())


def _head_of(model: Any, found: Any) -> Head:
    """Returns what a model does after its decoder, which has returned `found`."""

    def head(hidden_RE: Tensor) -> Tensor:
        with _returning(model.get_decoder(), type(found)(**{**found, "last_hidden_state": hidden_RE[None]})):
            logits: Tensor = model(input_ids=torch.zeros(1, len(hidden_RE), dtype=torch.long), use_cache=False).logits
        return logits[0]

    return head


@contextmanager
def _returning(decoder: nn.Module, output: Any) -> Iterator[None]:
    """Makes a decoder return what is known."""

    def known(*_: Any, **__: Any) -> Any:
        return output

    decoder.forward = known
    try:
        yield
    finally:
        del decoder.forward
