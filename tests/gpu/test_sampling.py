"""Tokens are drawn alike on a GPU and on a CPU: weights are whole numbers, so no order of a sum changes them."""

from __future__ import annotations

import pytest
import torch

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.sampling.drawing import draw
from ryzanstein.worker.sampling.sampler import sample

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocabulary", [1_024, 151_936])
def test_the_same_logits_give_the_same_tokens(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, vocabulary, generator=generator) * 4
    params = [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, top_p=0.9, seed=6),
        SamplingParams(temperature=1.3, top_k=40, min_p=0.02, seed=7),
        SamplingParams(temperature=0.0, presence_penalty=1.0, repetition_penalty=1.2),
    ]
    rows = [SampleRow(params[s % 4], 0, s, [1, 2, 3], [4, 5, 4]) for s in range(64)]
    on_cpu = [token.token_id for token in sample(logits, rows)]
    on_gpu = [token.token_id for token in sample(logits.cuda(), rows)]
    assert on_gpu == on_cpu


@pytest.mark.parametrize("vocabulary", [1_024, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_that_stay_on_the_device_are_the_same_and_nothing_waits_for_them(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(65, vocabulary, generator=generator) * 4).to(dtype)
    logits[-1] = torch.nan
    params = [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, top_p=0.9, seed=6),
        SamplingParams(temperature=1.3, top_k=40, min_p=0.02, seed=7),
        SamplingParams(temperature=1.0, top_k=600, top_p=0.99, seed=8),
    ]
    rows = {s: SampleRow(params[s % 4], 0, s, (), ()) for s in range(65)}
    on_cpu = [token.token_id for token in sample(logits[:64].float(), [rows[s] for s in range(64)])]
    on_gpu = logits.cuda()
    draw(on_gpu.clone(), rows)  # what is allocated and compiled at first may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw(on_gpu, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert on_gpu[:64].float().argmax(dim=1).tolist() == on_cpu
    assert on_gpu[:64].isfinite().sum(dim=1).tolist() == [1] * 64
    assert on_gpu[64].isnan().all()
