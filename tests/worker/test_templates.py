"""A node whose model has a hostile chat template, as a process: it refuses what the template spoils and serves all else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.tokens import FinishReason

pytestmark = pytest.mark.long

BOMBS = {
    "indent": "{{ messages | tojson(indent=100000000) }}",
    "loop": "{% for i in range(99999) %}" * 3 + "{% set x = i %}" + "{% endfor %}" * 3,
    "long": "{{ 'a' * (messages | length * 10**9) }}",
    "deep": "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
}


def with_template(demo_dir: Path, directory: Path, change) -> Path:
    """The demo model with another template."""
    shutil.copytree(demo_dir, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": change(config["chat_template"])}))
    return directory


@pytest.fixture
def bombed(demo_dir, tmp_path) -> Path:
    """What the last message asks for is done; other conversations are as ever."""
    asked = "".join(f"{{% if messages[-1].content == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items())
    return with_template(demo_dir, tmp_path / "demo", lambda template: asked + template)


async def test_a_template_that_goes_too_far_fails_its_request_alone(start_node, connect, attempt, bombed):
    node = start_node("--tuning", json.dumps({"templates": {"cpu_s": 0.5, "memory_bytes": 64 * 2**20}}), model=bombed, tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        alongside = asyncio.create_task(link.run(attempt(prompt=TextPrompt("Count"), max_tokens=400, ignore_eos=True), 60))
        for bomb in BOMBS:
            failed = (await link.run(attempt(question=bomb), 60)).failed
            assert failed.reason == "TEMPLATE_LIMIT", bomb
            assert not failed.node_fault
            assert (await link.run(attempt(max_tokens=5), 60)).tokens(), f"after {bomb}"
        assert (await alongside).finished[0].reason == FinishReason.LENGTH
        assert len(node.template_pids()) == 1
    assert node.process.poll() is None
    assert "Traceback" not in node.log_path.read_text()


async def test_the_process_is_started_again_and_ends_with_its_agent(start_node, connect, attempt, running):
    node = start_node(tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        assert (await link.run(attempt(max_tokens=5))).tokens()
        (first,) = node.template_pids()
        os.kill(first, signal.SIGKILL)
        assert (await link.run(attempt(max_tokens=5))).tokens()
        (second,) = node.template_pids()
        assert second != first
    node.process.kill()
    node.process.wait()
    for _ in range(100):
        if not running(second):
            break
        await asyncio.sleep(0.05)
    assert not running(second)


@pytest.mark.parametrize(
    ("template", "why"),
    [("{{ messages | no_such_filter }}", "no_such_filter"), ("{{ 7 ** (10 ** 8) }}", "takes too long"), ("{% if %}", "line 1")],
)
def test_a_template_that_cannot_be_compiled_is_refused_with_the_model(start_node, demo_dir, tmp_path, template, why):
    node = start_node(
        "--tuning", '{"templates": {"cpu_s": 0.5}}', model=with_template(demo_dir, tmp_path / "demo", lambda _: template), tp=1
    )
    assert node.process.wait(60) == 1
    failed = [event for event in node.events if event["event"] == "state" and event["state"] == "FAILED"]
    assert why in failed[-1]["reason"]
    assert "Traceback" not in node.log_path.read_text()


async def test_an_answer_with_a_form_is_content_where_the_template_opens_the_reasoning(
    start_node, connect, attempt, demo_dir, tmp_path
):
    model = with_template(demo_dir, tmp_path / "demo", lambda template: template + "<think>\n")
    node = start_node(model=model, tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        free = await link.run(attempt(max_tokens=3), 60)
        assert free.reply.opened
        formed = await link.run(attempt(max_tokens=9, constraint=Constraint.choice(["yes", "no"])), 60)
    assert formed.reply is None
    assert formed.text() in ("yes", "no")
