"""`ryzanstein inspect`: what is shown is what a node that serves the model takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ryzanstein.cli.up.default_tp import default_tp
from ryzanstein.demo import MODEL_DIR
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.sizing import need_of


def inspect(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "ryzanstein.tools.inspect", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def one_head(tmp_path: Path) -> Path:
    """A model with a single head."""
    path = tmp_path / "one"
    shutil.copytree(MODEL_DIR, path)
    config = json.loads((path / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": head, "intermediate_size": 384}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_sum_is_what_a_node_counts() -> None:
    facts = json.loads(inspect("demo", "--tp", "2", "--device", "cpu", "--json").stdout)
    settings = WorkerSettings(model=str(MODEL_DIR), tp=2, device="cpu")
    assert facts["total_bytes"] == need_of(MODEL_DIR, settings)
    parts = ("weight_bytes", "kv_cache_bytes", "rank_bytes", "step_or_load_bytes")
    assert sum(facts[part] for part in parts) == facts["total_bytes"]
    assert facts["possible_tp"] == list(range(1, 9))


def test_a_conversation_takes_its_blocks_of_the_cache() -> None:
    facts = json.loads(inspect("demo", "--context", "1600", "--kv-bytes", str(10 * 2**20), "--device", "cpu", "--json").stdout)
    # 4 layers, keys and values of 4 heads with 32 or fewer numbers, as float32, in blocks of 16 tokens.
    config = json.loads((MODEL_DIR / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    of_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * 4
    assert facts["conversation_bytes"] == 1600 * of_token
    assert facts["conversations"] == 10 * 2**20 // (1600 * of_token)


def test_what_the_model_may_be_asked_for_is_shown() -> None:
    facts = json.loads(inspect("demo", "--json").stdout)
    assert (facts["answers"], facts["tools"], facts["reasoning"], facts["infill"]) == ("chat", "generic", False, False)
    assert "chats: calls functions as any text" in inspect("demo").stdout


def test_neither_torch_nor_a_weight_is_read() -> None:
    program = "import sys; sys.argv[1:] = ['demo', '--device', 'cpu']; from ryzanstein.tools import inspect\n"
    program += "try: inspect.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("missing",), 1, "does not exist, and no fetched model has this name"),
        (("demo", "--tp", "9"), 1, "8 attention heads of 4 key-value heads for 9 ranks: each needs an attention head"),
        (("demo", "--kv-bytes", "1"), 1, "smaller than one block"),
        (("demo", "--kv-bytes", str(2**50)), 1, ""),
        (("demo", "--context", "0"), 2, "--context"),
    ],
)
def test_what_cannot_be_served_ends_with_a_code(words: tuple[str, ...], code: int, message: str) -> None:
    done = inspect(*words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_of_up_has_one_rank_where_a_model_has_one_head(one_head: Path, tmp_path: Path) -> None:
    assert default_tp([MODEL_DIR]) == 2
    assert default_tp([MODEL_DIR, one_head]) == 1
    assert default_tp([tmp_path / "missing"]) == 2
