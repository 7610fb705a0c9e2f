"""The training program: what it learns from is reproducible, and its processes add up to one."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.demo.dialogues import dialogue
from ryzanstein.lab.demo.encoding import batches, encode
from ryzanstein.lab.demo.train import Options, config, loss_of, make_tokenizer, optimizers, pools, rate, save
from ryzanstein.lab.demo.words import Split

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config(TOKENIZER))


def test_the_committed_tokenizer_is_the_one_that_training_makes() -> None:
    assert make_tokenizer().to_str() == TOKENIZER.to_str()


def test_the_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    rates = [rate(step, 1000) for step in (0, 99, 300, 500, 750, 1000)]
    assert rates == pytest.approx([0.01, 1.0, 1.0, 1.0, 0.5, 0.0])


def test_every_process_sees_the_same_batches(tmp_path: Path) -> None:
    first, second = (next(pools(Options(tmp_path, 10, 2, 1), TOKENIZER)) for _ in range(2))
    assert all(torch.equal(a.ids_RT, b.ids_RT) for a, b in zip(first, second, strict=True))


def test_no_process_is_left_without_a_row(tmp_path: Path) -> None:
    for pool in islice(pools(Options(tmp_path, 10, 4, 1), TOKENIZER), 2):
        assert all(len(batch.ids_RT) >= 4 for batch in pool)


def test_the_losses_of_two_processes_add_up_to_the_loss_of_one(model: LlamaForCausalLM) -> None:
    rows = [encode(TOKENIZER, dialogue(Split.TRAIN, seed)) for seed in range(6)]
    batch = next(batches(rows, TOKENIZER, 4096))
    whole = loss_of(model, batch, 0, 1).item()
    assert loss_of(model, batch, 0, 2).item() + loss_of(model, batch, 1, 2).item() == pytest.approx(whole, rel=1e-2)


def test_every_weight_has_one_optimizer(model: LlamaForCausalLM) -> None:
    groups = [group["params"] for optimizer in optimizers(model, 1e-3) for group in optimizer.param_groups]
    assert sorted(id(weight) for group in groups for weight in group) == sorted(map(id, model.parameters()))


def test_a_saved_directory_is_loaded_with_the_same_logits(model: LlamaForCausalLM, tmp_path: Path) -> None:
    save(model, TOKENIZER, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids_RT = torch.tensor([encode(TOKENIZER, dialogue(Split.TRAIN, 1)).ids])
    with torch.inference_mode():
        assert torch.equal(loaded(ids_RT).logits, model(ids_RT).logits)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "generation_config.json", "tokenizer.json"}
