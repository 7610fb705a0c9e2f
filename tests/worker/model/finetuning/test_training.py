"""A training learns, goes on where it was stopped to the bit, and writes what others read."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.model.finetuning.conftest import DEMO, chats

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.tools.finetune.base.model import build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.data.batches import planned
from ryzanstein.tools.finetune.data.chats import Encoder
from ryzanstein.tools.finetune.data.examples import read_examples
from ryzanstein.tools.finetune.merging import merge
from ryzanstein.tools.finetune.refusal import DataRefused, Diverged
from ryzanstein.tools.finetune.request import FinetuneRequest, LoraShape, Schedule, Watching
from ryzanstein.tools.finetune.run import finetune
from ryzanstein.tools.finetune.training.precision import fastest
from ryzanstein.tools.finetune.training.session import Stopped
from ryzanstein.tools.finetune.training.trainer import last_checkpoint
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.text.tokenizer import TextModel

SHORT = Schedule(epochs=2, batch=4, learning_rate=2e-3, max_length=64)
SAVED = Watching(every=3, patience=0, save_every_s=0)


def short_request(base: Path, file: Path, out: Path) -> FinetuneRequest:
    return FinetuneRequest(base, file, out, 0.2, LoraShape(4, 8.0), SHORT, SAVED)


def after(steps: int) -> Callable[[], bool]:
    """What is asked after each step, three times, and says to stop after so many."""
    asked = iter(range(10_000))
    return lambda: next(asked) >= 2 * steps - 1


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the demonstration model that has learned to write facts in a format."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats(120, 1)))
    schedule = Schedule(epochs=6, learning_rate=5e-3, max_length=64)
    request = FinetuneRequest(DEMO, folder / "data.jsonl", folder / "facts", 0.1, LoraShape(8, 16.0), schedule, gguf=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    finetune(request, StringIO())
    torch.set_num_threads(before)
    return folder / "facts"


def correct(model: Any, count: int) -> int:
    """How many held-out facts a model writes as it was taught, greedily."""
    text = TextModel.load(DEMO)
    found = 0
    for each in chats(count, 99):
        asked, said = (message["content"] for message in each["messages"])
        ids = text.encode_chat([Message(Role.USER, asked)])
        end = {"eos_token_id": list(text.eos_token_ids), "pad_token_id": 1, "use_cache": True}
        answer = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False, **end)[0, len(ids) :].tolist()
        found += text.decode(answer).strip() == said and answer[-1] in text.eos_token_ids
    return found


def test_a_model_learns_a_format_that_it_did_not_know(learned: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(DEMO)
    assert correct(base, 20) == 0
    assert correct(PeftModel.from_pretrained(base, learned), 20) >= 19


def test_the_report_the_curve_and_the_card_are_of_this_training(learned: Path) -> None:
    report = json.loads((learned / "training.json").read_text())
    assert report["result"]["steps"] == len(report["losses"])
    assert report["losses"][-1] < 0.01 * report["losses"][0]
    read = report["result"]["tokens_per_s"] * report["result"]["seconds"] / report["data"]["tokens"]
    assert 0.9 * 6 < read < 1.5 * 6, "each of 6 epochs reads the data and some padding"
    best = min(report["validations"], key=lambda each: each["loss"])
    assert report["result"]["validation_loss"] == pytest.approx(best["loss"], rel=1e-3)
    assert (report["base"]["name"], report["data"]["format"]) == ("demo", "chat")
    picture = ElementTree.fromstring((learned / "loss.svg").read_text())
    assert len([each for each in picture if each.tag.endswith("polyline")]) == 2
    card = (learned / "README.md").read_text()
    assert f"step {report['result']['best_step']} of {report['result']['steps']}" in card
    assert "base_model: " in card.split("---")[1]
    config = json.loads((learned / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (8, 16, True)
    assert config["base_model_name_or_path"] == str(DEMO)
    assert not list(learned.parent.glob(".*"))


def test_a_merged_model_has_the_logits_of_the_base_with_the_adapter(learned: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merge(DEMO, learned, tmp_path / "merged", torch.float32)
    ids_NT = torch.randint(2, 1000, (2, 30))
    with torch.no_grad():
        expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(DEMO), learned)(ids_NT).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids_NT).logits
        with Base.open(tmp_path / "merged") as base:
            ours = build(base)(ids_NT).logits
    assert (theirs - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(ours, theirs)
    assert TextModel.load(tmp_path / "merged").encode("A text.") == TextModel.load(DEMO).encode("A text.")


def test_an_adapter_that_lacks_a_tensor_or_has_a_foreign_one_is_not_merged(learned: Path, tmp_path: Path) -> None:
    for name, changed in (
        ("lacking", lambda state: state.popitem()),
        ("foreign", lambda state: state.update(odd=torch.ones(1))),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes((learned / "adapter_config.json").read_bytes())
        state = load_file(learned / "adapter_model.safetensors")
        changed(state)
        save_file(state, folder / "adapter_model.safetensors")
        with pytest.raises(ModelRefused, match=rf"{name}: (lacks tensors|has tensors that the model has no place for)"):
            merge(DEMO, folder, tmp_path / "merged", torch.float32)
        assert not (tmp_path / "merged").exists()


def test_the_gguf_adapter_has_the_permuted_rows_and_the_scale(learned: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(learned / "facts.gguf")
    assert reader.fields["adapter.lora.alpha"].contents() == 8.0
    assert reader.fields["general.type"].contents() == "adapter"
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    state = load_file(learned / "adapter_model.safetensors")
    begin = "base_model.model.model.layers.1.self_attn."
    assert torch.equal(stored["blk.1.attn_q.weight.lora_a"], state[f"{begin}q_proj.lora_A.weight"])
    query = state[f"{begin}q_proj.lora_B.weight"] * 2
    in_pairs = query.view(8, 2, 12, 8).transpose(1, 2).reshape(192, 8)  # as llama.cpp's files have rotary halves
    assert torch.equal(stored["blk.1.attn_q.weight.lora_b"], in_pairs)
    assert torch.equal(stored["blk.1.attn_v.weight.lora_b"], state[f"{begin}v_proj.lora_B.weight"] * 2)
    assert len(stored) == len(state)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "packing": True, "batch": 2, "checkpointing": True}])
def test_a_stopped_training_goes_on_to_the_same_bits(
    changes: dict[str, Any], quantized: Path, data: Callable[..., Path], tmp_path: Path
) -> None:
    file = data(chats(30, 1))
    whole = short_request(quantized, file, tmp_path / "whole")
    whole = replace(whole, schedule=replace(SHORT, **changes))
    finetune(whole, StringIO())
    parts = replace(whole, out=tmp_path / "parts")
    for steps in (2, 1):
        with pytest.raises(Stopped, match=r"stopped after step \d+ of"):
            finetune(parts, StringIO(), after(steps))
    said = StringIO()
    finetune(parts, said)
    assert "goes on after step" in said.getvalue()
    expected, found = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("whole", "parts"))
    assert found["losses"] == expected["losses"]
    assert found["validations"] == expected["validations"]
    assert (tmp_path / "parts/adapter_model.safetensors").read_bytes() == (
        tmp_path / "whole/adapter_model.safetensors"
    ).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "parts", "whole"]


def test_links_to_the_base_the_data_and_the_directory_are_followed(
    gguf: Path, data: Callable[..., Path], tmp_path: Path
) -> None:
    """As caches of models have them: the file itself has a name that does not say what it is."""
    (tmp_path / "blob").hardlink_to(gguf)
    (tmp_path / "disk").mkdir()
    file = data([{"text": f"One, two, {number}."} for number in range(8)])
    targets = {"model.gguf": "blob", "linked.jsonl": file, "here": "disk"}
    for name, target in targets.items():
        (tmp_path / name).symlink_to(target)
    request = short_request(tmp_path / "model.gguf", tmp_path / "linked.jsonl", tmp_path / "here/out")
    finetune(replace(request, schedule=replace(SHORT, epochs=1)), StringIO())
    report = json.loads((tmp_path / "disk/out/training.json").read_text())
    assert (report["base"]["name"], report["data"]["file"]) == ("model", "linked.jsonl")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["out"]


def test_another_training_does_not_go_on_with_what_is_left(quantized: Path, data: Callable[..., Path], tmp_path: Path) -> None:
    request = short_request(quantized, data(chats(30, 1)), tmp_path / "out")
    with pytest.raises(Stopped):
        finetune(request, StringIO(), after(1))
    other = replace(request, schedule=replace(SHORT, learning_rate=1e-3))
    with pytest.raises(ModelRefused, match=r"left by another training \(--learning-rate 0.002, now 0.001\)"):
        finetune(other, StringIO())
    with pytest.raises(ModelRefused, match="left by another training"):
        finetune(replace(request, data=data(chats(31, 1), "more.jsonl")), StringIO())


def test_a_checkpoint_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    for step, complete in ((2, True), (10, True), (12, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if complete:
            (tmp_path / f"checkpoint-{step}/complete").touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-12").exists()


def test_validation_that_gets_worse_ends_the_training_and_the_best_is_kept(data: Callable[..., Path], tmp_path: Path) -> None:
    file, other = data(chats(8, 1)), data([{"text": "One, two, three, four."}], "other.jsonl")
    schedule = Schedule(epochs=30, batch=4, learning_rate=2e-2, max_length=64)
    watching = Watching(every=2, patience=2, save_every_s=1000)
    finetune(FinetuneRequest(DEMO, file, tmp_path / "out", other, LoraShape(4, 8.0), schedule, watching), StringIO())
    report = json.loads((tmp_path / "out/training.json").read_text())
    found = [(each["loss"], each["step"]) for each in report["validations"]]
    assert report["result"]["steps"] < 60
    assert report["result"]["best_step"] == min(found)[1]
    assert [step for _, step in found][-1] == report["result"]["best_step"] + 4


def test_a_loss_that_is_no_number_is_an_error_and_leaves_nothing(data: Callable[..., Path], tmp_path: Path) -> None:
    broken = shutil.copytree(DEMO, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] *= 1e38
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(Diverged, match="step 1: the loss is nan"):
        finetune(short_request(broken, data(chats(16)), tmp_path / "out"), StringIO())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "data.jsonl"]


def test_packed_rows_have_the_loss_of_rows_apart(quantized: Path, data: Callable[..., Path]) -> None:
    from ryzanstein.tools.finetune.data.batches import collated
    from ryzanstein.tools.finetune.training.loss import summed_loss

    read = read_examples(data(chats(12, 3)), Encoder(TextModel.load(DEMO)), 64)
    packed, apart = (planned(read.examples, 4, 1, 0, pack_to) for pack_to in (128, None))
    with Base.open(quantized) as base, torch.no_grad():
        model = build(base)
        sums = [
            sum(float(summed_loss(model, collated(read.examples, batch))) for batch in plan.batches) for plan in (packed, apart)
        ]
    assert any(len(row) > 1 for batch in packed.batches for row in batch)
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    assert sorted(index for batch in packed.batches for row in batch for index in row) == list(range(12))


def test_products_in_16_bits_learn_as_those_in_32(data: Callable[..., Path], tmp_path: Path) -> None:
    found = []
    for compute in ("float32", "bfloat16"):
        request = short_request(DEMO, data(chats(30, 1)), tmp_path / compute)
        finetune(replace(request, schedule=replace(SHORT, compute=compute)), StringIO())
        found.append(json.loads((tmp_path / compute / "training.json").read_text())["losses"])
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert fastest() == "float32" or found[1] != found[0]
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


def test_an_estimate_trains_nothing(data: Callable[..., Path], tmp_path: Path) -> None:
    said = StringIO()
    finetune(replace(short_request(DEMO, data(chats(30)), tmp_path / "out"), estimate=True), said)
    assert re.search(r"\d+ steps at \d+ tokens/s: about \d+ s, [\d.]+ GB of [\d.]+ GB memory", said.getvalue())
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_places_that_are_somebodys_are_not_written(data: Callable[..., Path], tmp_path: Path) -> None:
    file = data(chats(10))
    (tmp_path / "there").mkdir()
    (tmp_path / "there/notes.txt").write_text("mine")
    for out, message in (
        (tmp_path / "there", "exists already"),
        (tmp_path / "absent/out", "is not a directory"),
        (file, "exists already"),
    ):
        with pytest.raises(ModelRefused, match=message):
            finetune(short_request(DEMO, file, out), StringIO())
    with pytest.raises(DataRefused, match="No such file"):
        finetune(short_request(DEMO, tmp_path / "absent.jsonl", tmp_path / "out"), StringIO())
