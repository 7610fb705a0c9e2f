"""What one huge channel of a head's keys costs: the error of attention's answer, on synthetic keys.

Keys and queries are normal numbers; one channel of the keys is a constant and some noise, both so
many times as large, as models have them. Its queries are as much smaller, so that the scores keep
their size.
"""

from __future__ import annotations

import torch

from ryzanstein.lab.bench.kv.attention_time import KINDS
from ryzanstein.lab.bench.kv.options import HOT_TOKENS
from ryzanstein.worker.kernels.functions.attention import AttentionFunctions
from ryzanstein.worker.kernels.functions.cold_layout import PAGE_TOKENS, ColdLayout
from ryzanstein.worker.kernels.functions.paged_keys import ColdKeys, PagedKeys

FACTORS = (1.0, 10.0, 100.0, 1000.0)
_TOKENS, _DIM, _GROUP, _SEED = 1024, 128, 8, 17


def outlier_errors(kernels: AttentionFunctions, factor: float) -> dict[str, float]:
    """Returns the root of the mean square of each kind's error, divided by that of the exact answer."""
    generator = torch.Generator().manual_seed(_SEED)
    slots_NC = torch.randn(_TOKENS, 2 * _DIM, generator=generator)
    slots_NC[:, 0] = (slots_NC[:, 0] * 0.2 + 1) * factor
    q_TKGD = torch.randn(1, 1, _GROUP, _DIM, generator=generator)
    q_TKGD[..., 0] /= factor
    keys_LD, values_LD = slots_NC[:, :_DIM].double(), slots_NC[:, _DIM:].double()
    exact_GD = (q_TKGD[0, 0].double() @ keys_LD.T * _DIM**-0.5).softmax(1) @ values_LD
    found = {}
    for name, (dtype, kind) in KINDS.items():
        table_1B, cold, cold_BX = torch.arange(_TOKENS // PAGE_TOKENS).unsqueeze(0), None, None
        if kind is not None:
            layout = ColdLayout(kind, 1, _DIM)
            cold, cold_BX = (
                ColdKeys(table_1B, layout, HOT_TOKENS),
                torch.zeros(len(table_1B[0]), layout.block_bytes, dtype=torch.uint8),
            )
            kernels.seal(slots_NC, table_1B[0], cold_BX, table_1B[0], layout)
        one, zero, length = (torch.tensor([n]) for n in (1, 0, _TOKENS))
        keys = PagedKeys(zero, one, table_1B, length, PAGE_TOKENS, cold=cold)
        out_TKGD = torch.empty_like(q_TKGD)
        kernels.attend(q_TKGD, slots_NC.to(dtype), keys, (_DIM**-0.5, None), out_TKGD, cold_BX=cold_BX)
        error = (out_TKGD[0, 0].double() - exact_GD).square().mean().sqrt() / exact_GD.square().mean().sqrt()
        found[name] = float(error)
    return found
