"""Our engine's sums against transformers' logits, in double precision."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.bench.quality.models import ModelRoom, OwnModel
from ryzanstein.lab.bench.quality.scoring import Judged, greedy_answer, greedy_match, judge_window
from ryzanstein.lab.bench.quality.texts import TextWindow

ROOM = ModelRoom(max_tokens=200, at_once=32, threads=1)
IDS = tuple(torch.randint(2, 300, (120,), generator=torch.Generator().manual_seed(3)).tolist())


def expected_log_probs(model_dir: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([IDS])).logits[0], -1)


def test_loss_and_divergence_are_those_of_the_definition() -> None:
    p, q = (torch.randn(50, 300, generator=torch.Generator().manual_seed(seed)) * 4 + 20 for seed in (1, 2))
    targets = torch.arange(50)
    judged = Judged()
    judged.add(p[:20], q[:20], targets[:20])
    judged.add(p[20:], q[20:], targets[20:])
    log_p, log_q = torch.log_softmax(p.double(), 1), torch.log_softmax(q.double(), 1)
    sums = judged.sums()
    assert sums.num_tokens == 50
    assert sums.loss == pytest.approx(-float(log_q[targets, targets].sum()), rel=1e-6)
    assert sums.divergence == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum()), rel=1e-6)
    assert sums.same == int((p.argmax(1) == q.argmax(1)).sum())


def test_a_tiny_divergence_is_not_lost_in_rounding() -> None:
    p = torch.randn(20, 100_000, generator=torch.Generator().manual_seed(1)) * 3 + 30
    q = p + torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) * 3e-3
    log_p, log_q = torch.log_softmax(p.double(), 1), torch.log_softmax(q.double(), 1)
    expected = float((log_p.exp() * (log_p - log_q)).sum())
    assert expected / 20 < 1e-5
    judged = Judged()
    judged.add(p, q, torch.zeros(20, dtype=torch.long))
    assert judged.sums().divergence == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("at_once", [32, 7])
def test_our_engine_beside_itself_has_transformers_loss_and_no_divergence(at_once: int) -> None:
    model = OwnModel(MODEL_DIR, "none", ROOM)
    (sums,) = judge_window(model, [model], TextWindow(IDS, range(1, len(IDS))), at_once)
    log_probs = expected_log_probs(MODEL_DIR)[:-1]
    expected = -float(log_probs[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].sum())
    assert sums.loss == pytest.approx(expected, rel=1e-5)
    assert (sums.num_tokens, sums.divergence, sums.same) == (len(IDS) - 1, 0, len(IDS) - 1)


def test_a_format_has_the_divergence_of_its_logits() -> None:
    reference, model = OwnModel(MODEL_DIR, "none", ROOM), OwnModel(MODEL_DIR, "int8", ROOM)
    scored = [5, 6, 7, 40, 41, 119]
    (sums,) = judge_window(reference, [model], TextWindow(IDS, scored), 32)
    places = torch.tensor(scored) - 1
    model.restart()
    found = torch.log_softmax(torch.cat([model.advance(IDS[s : s + 32]).clone() for s in range(0, 120, 32)]).double(), -1)
    expected = expected_log_probs(MODEL_DIR)
    divergence = (expected.exp() * (expected - found))[places].sum()
    assert sums.num_tokens == 6
    assert sums.divergence == pytest.approx(float(divergence), rel=0.01)
    assert sums.loss == pytest.approx(-float(found[places, torch.tensor(IDS)[scored]].sum()), rel=1e-5)


def test_logits_do_not_depend_on_how_many_tokens_are_read_at_once(native_only: None) -> None:
    model = OwnModel(MODEL_DIR, "int8", ROOM)
    parts = []
    for size in (1, 16, 32):
        model.restart()
        parts.append(torch.cat([model.advance(IDS[start : start + size]).clone() for start in range(0, 64, size)]))
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[0], parts[2])


def test_the_equal_beginning_is_that_of_the_models_own_greedy_answer() -> None:
    """The int8 model soon leaves the reference's answer to these random tokens."""
    reference, model = OwnModel(MODEL_DIR, "none", ROOM), OwnModel(MODEL_DIR, "int8", ROOM)
    lengths = set()
    for start in range(0, 60, 6):
        prompt = IDS[start : start + 40]
        wanted, found = (greedy_answer(each, prompt, 24, 32) for each in (reference, model))
        match = greedy_match(model, prompt, wanted, 10)
        until = next((place for place in range(24) if wanted[place] != found[place]), 24)
        assert match.until_different == until
        assert match.until_different <= match.same <= 24
        assert greedy_match(reference, prompt, wanted, 10).same == 24
        lengths.add(until)
    assert lengths - {24}
