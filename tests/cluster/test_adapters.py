"""Adapters through the whole cluster: added from the command line, asked for by OpenAI's client, moved by failover."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import NotFoundError, OpenAI
from safetensors.torch import save_file

from ryzanstein.cli.processes.cluster import ClusterSpec
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference

WIDTHS = {"q_proj": (192, 192), "k_proj": (192, 96), "v_proj": (192, 96), "o_proj": (192, 192)}
WIDTHS |= {"gate_proj": (192, 512), "up_proj": (192, 512), "down_proj": (512, 192)}
pytestmark = pytest.mark.long

PROMPT = "Count from 1 to 9."
Holds = Callable[[Callable[[], bool], float], bool]


def write_adapter(folder: Path, seed: int, rank: int = 4, size: float = 1.0) -> Path:
    """Writes a random adapter of the demo model as peft does."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, (inputs, outputs) in WIDTHS.items():
            part = "self_attn" if name[0] in "qkvo" else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * inputs**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * size
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(WIDTHS), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Adapted:
    """A cluster with the command line and OpenAI's client."""

    def __init__(self, harness: Any) -> None:
        self.harness, self.cluster = harness, harness.cluster
        self.openai = OpenAI(base_url=f"{self.cluster.http_url}/v1", api_key="none", max_retries=0)

    def command(self, *words: str, code: int = 0) -> str:
        orchestrator = self.cluster.services["orchestrator"].grpc_address
        command = (sys.executable, "-P", "-m", "ryzanstein.cli", "adapters", *words, "--orchestrator", orchestrator)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def add(self, name: str, path: Path, *options: str, code: int = 0) -> str:
        return self.command("add", name, str(path), "--to", "demo", *options, code=code)

    def ask(self, model: str, prompt: str = PROMPT, **options: Any) -> str:
        given = {"temperature": 0, "max_tokens": 24, "messages": [{"role": "user", "content": prompt}], **options}
        answer = self.openai.chat.completions.create(model=model, **given)
        assert answer.model == model
        return str(answer.choices[0].message.content)


@pytest.fixture(scope="module")
def adapted(new_harness: Callable[[ClusterSpec], Iterator[Any]]) -> Iterator[Adapted]:
    for harness in new_harness(ClusterSpec(MODEL_DIR, num_nodes=2, tp=2)):
        yield Adapted(harness)


def test_a_name_answers_with_its_adapter_until_it_is_removed(adapted: Adapted, tmp_path: Path, holds: Holds) -> None:
    base = adapted.ask("demo")
    assert "ready on 2 of 2 nodes" in adapted.add("one", write_adapter(tmp_path / "one", 1))
    adapted.add("two", write_adapter(tmp_path / "two", 2))
    one, two = adapted.ask("one"), adapted.ask("two")
    assert len({base, one, two}) == 3
    assert adapted.ask("demo") == base, "the model alone has changed"
    listed = {model.id: model for model in adapted.openai.models.list()}
    assert (listed["one"].model_extra or {}).get("parent") == "demo"
    with ThreadPoolExecutor(12) as pool:  # in one batch with each other and with the model alone
        asked = [("one", one), ("two", two), ("demo", base)] * 4
        assert list(pool.map(adapted.ask, [name for name, _ in asked])) == [answer for _, answer in asked]
    found = json.loads(adapted.command("list", "--json"))["adapters"]
    assert [each["name"] for each in found] == ["one", "two"]
    assert all(node["revision"] == 1 for each in found for node in each["nodes"])
    adapted.command("remove", "one")
    assert holds(lambda: _is_unknown(adapted, "one"), 10)
    assert adapted.ask("two") == two
    assert "ADAPTER_NOT_FOUND" in adapted.command("remove", "one", code=1)


def _is_unknown(adapted: Adapted, name: str) -> bool:
    try:
        adapted.ask(name, max_tokens=1)
    except NotFoundError:
        return True
    return False


def test_another_content_under_a_name_answers_at_once_and_in_warm_caches(adapted: Adapted, tmp_path: Path) -> None:
    folder, prompt = tmp_path / "changing", "word " * 200
    adapted.add("changing", write_adapter(folder, 3))
    first = adapted.ask("changing", prompt)
    assert adapted.ask("changing", prompt) == first
    adapted.add("changing", write_adapter(folder, 4))
    second = adapted.ask("changing", prompt)
    assert second != first
    adapted.add("changing", write_adapter(folder, 3))
    assert adapted.ask("changing", prompt) == first


def test_an_adapter_that_does_not_fit_is_refused_by_name_and_the_old_one_stays(adapted: Adapted, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "fits", 5)
    adapted.add("fits", folder)
    answer = adapted.ask("fits")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert "use_dora" in adapted.add("fits", folder, code=1)
    assert "no node has the model 'nobody'" in adapted.command("add", "x", str(folder), "--to", "nobody", "--wait", "1", code=1)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    adapted.add("fits", folder)
    assert adapted.ask("fits") == answer


def test_files_may_go_while_they_are_in_memory_and_are_refused_where_they_must_be_read(
    adapted: Adapted, tmp_path: Path, holds: Holds
) -> None:
    adapted.add("kept", write_adapter(tmp_path / "kept", 8), "--pin")
    adapted.add("gone", write_adapter(tmp_path / "gone", 9))
    answer = adapted.ask("kept")
    shutil.rmtree(tmp_path / "kept")
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    assert [adapted.ask("kept") for _ in range(4)] == [answer] * 4
    with pytest.raises(NotFoundError, match="it or its files were removed or replaced"):
        adapted.ask("gone")
    assert holds(lambda: _is_unknown(adapted, "gone"), 10)
    (listed,) = [each for each in json.loads(adapted.command("list", "--json"))["adapters"] if each["name"] == "gone"]
    assert all("adapter_config.json: No such file or directory" in node["refusal"] for node in listed["nodes"])
    adapted.add("gone", tmp_path / "elsewhere")
    assert adapted.ask("gone") != answer


def test_answers_of_an_adapter_go_on_at_another_node(adapted: Adapted, answers: Any, tmp_path: Path) -> None:
    adapted.add("moving", write_adapter(tmp_path / "moving", 6))
    client, killed = adapted.harness.client, set()

    def ask(on_delta: Callable[[Any], None] | None = None) -> Any:
        request = client.request(PROMPT, max_tokens=300, ignore_eos=True, logprobs=1)
        request.model = "moving"
        stream = client.inference.StreamChat(inference.StreamChatRequest(chat=request), timeout=60)
        return client.read(stream, on_delta=on_delta)

    def kill(delta: inference.GenerationDelta) -> None:
        if delta.first_index >= 20 and not killed:
            killed.add(delta.node_id)
            adapted.cluster.services[delta.node_id].kill()

    undisturbed = ask()
    answer = ask(kill)
    answers.assert_equal(answer, undisturbed)
    assert len(answer.nodes) == 2
    for node_id in killed:
        adapted.cluster.services[node_id].start()
    adapted.harness.wait_at_least(2)
    answers.assert_equal(ask(), undisturbed)


def test_a_session_stays_with_its_adapter(adapted: Adapted, tmp_path: Path) -> None:
    adapted.add("spoken", write_adapter(tmp_path / "spoken", 7))
    body = {"model": "spoken", "session_id": "with-adapter", "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}
    url = f"{adapted.cluster.http_url}/v1/chat/completions"
    assert httpx.post(url, json=body, timeout=60).json()["model"] == "spoken"
    assert httpx.post(url, json={**body, "model": ""}, timeout=60).json()["model"] == "spoken"
    assert httpx.post(url, json={**body, "model": "demo"}, timeout=60).status_code == 400


def test_the_three_lines_of_the_readme_train_and_serve_an_adapter(adapted: Adapted, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = re.findall(r"## With an adapter\n\n```bash\n(.*?)```", readme, re.DOTALL)
    chat = {"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "one two three"}]}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(chat)}\n" * 8)
    orchestrator = adapted.cluster.services["orchestrator"].grpc_address
    for line in block.splitlines():
        words = shlex.split(line.replace("http://127.0.0.1:8000", adapted.cluster.http_url))
        if words[0] == ".venv/bin/ryzanstein":
            where = (
                ("--orchestrator", orchestrator) if words[1] == "adapters" else ("--epochs", "40", "--learning-rate", "5e-3")
            )
            words = [sys.executable, "-P", "-m", "ryzanstein.cli", *words[1:], *where]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "one two three"
