"""vLLM's routes load and unload adapters for keys that may, on every node of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.keyed.conftest import KeyedCluster
from tests.cluster.test_adapters import write_adapter

pytestmark = pytest.mark.long


class Operator:
    """Posts to the routes, and asks with OpenAI's."""

    def __init__(self, keyed: KeyedCluster) -> None:
        self._keyed = keyed

    def post(self, route: str, key: str = "operator", **body: Any) -> httpx.Response:
        headers = self._keyed.headers(key) if key else {}
        return httpx.post(f"{self._keyed.url}/{route}", json=body, headers=headers, timeout=90)

    def load(self, name: str, path: Path | str, **more: Any) -> httpx.Response:
        return self.post("load_lora_adapter", lora_name=name, lora_path=str(path), **more)

    def unload(self, name: str) -> httpx.Response:
        return self.post("unload_lora_adapter", lora_name=name)

    def ask(self, model: str) -> str:
        asked = {"messages": [{"role": "user", "content": "Count from 1 to 9."}], "temperature": 0, "max_tokens": 16}
        answer = self.post("chat/completions", model=model, **asked)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def operator(keyed_cluster: KeyedCluster) -> Operator:
    return Operator(keyed_cluster)


def failed(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_an_adapter_is_loaded_replaced_and_unloaded(operator: Operator, tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "two", 2)
    base = operator.ask("demo")
    loaded = operator.load("one", one)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'one' added successfully.")
    first = operator.ask("one")
    assert first != base
    status, param, message = failed(operator.load("one", two))
    assert (status, param) == (400, "lora_name")
    assert "has already been loaded" in message
    assert operator.ask("one") == first
    assert operator.load("one", two, load_inplace=True, base_model_name="demo").status_code == 200
    assert operator.ask("one") not in (base, first)
    assert operator.ask("demo") == base
    unloaded = operator.unload("one")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'one' removed successfully.")
    assert operator.post("chat/completions", model="one", messages=[{"role": "user", "content": "hi"}]).status_code == 404
    assert operator.unload("one").status_code == 404


def test_nothing_changes_where_an_adapter_does_not_fit(operator: Operator, tmp_path: Path) -> None:
    unfit = write_adapter(tmp_path / "unfit", 3)
    config = json.loads((unfit / "adapter_config.json").read_text())
    (unfit / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    status, param, message = failed(operator.load("unfit", unfit))
    assert (status, param) == (400, "lora_path")
    assert "lora_A" in message
    assert operator.unload("unfit").status_code == 404
    assert operator.load("kept", write_adapter(tmp_path / "kept", 4)).status_code == 200
    answer = operator.ask("kept")
    assert operator.load("kept", unfit, load_inplace=True).status_code == 400
    assert operator.ask("kept") == answer
    assert operator.unload("kept").status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"lora_name": "x", "lora_path": "relative"}, "lora_path", 400),
        ({"lora_name": "x", "lora_path": ""}, "lora_path", 400),
        ({"lora_name": "", "lora_path": "/x"}, "lora_name", 400),
        ({"lora_name": "x" * 1025, "lora_path": "/x"}, "lora_name", 400),
        ({"lora_name": "x", "lora_path": "/" + "x" * 2000}, "lora_path", 400),
        ({"lora_name": "demo", "lora_path": "/x"}, "lora_name", 400),
        ({"lora_name": "x"}, "lora_path", 400),
        ({"lora_name": "x", "lora_path": "/x", "base_model_name": "nobody"}, "model", 404),
        ({"lora_name": "x", "lora_path": "/nowhere/at/all"}, "lora_path", 400),
    ],
)
def test_a_bad_body_is_refused_by_its_field(operator: Operator, body: dict[str, Any], param: str, status: int) -> None:
    assert failed(operator.post("load_lora_adapter", **body))[:2] == (status, param)


def test_only_keys_with_the_scope_may(operator: Operator, tmp_path: Path) -> None:
    body = {"lora_name": "mine", "lora_path": str(write_adapter(tmp_path / "mine", 5))}
    for key, status in (("acme", 403), ("reader", 403), ("stranger", 401), ("", 401)):
        for route in ("load_lora_adapter", "unload_lora_adapter"):
            assert operator.post(route, key, **body).status_code == status, (key, route)
    assert operator.unload("mine").status_code == 404
