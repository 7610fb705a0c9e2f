"""The digest of weights: the same for copies, another for any other bit."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from ryzanstein.demo import MODEL_DIR
from ryzanstein.worker.agent.pages import weights
from ryzanstein.worker.checkpoints.weight_files import stamp


def weights_digest(model, stopped=lambda: False):
    return weights.weights_digest(model, stamp(model), stopped)


def test_files_that_changed_since_they_were_loaded_have_none_whatever_the_clock_of_their_server_says(tmp_path) -> None:
    """A file server's clock may be ahead of ours, or behind it."""
    for ahead_s in (-86_400, 0, 86_400):
        model = tmp_path / f"{ahead_s}.gguf"
        model.write_bytes(b"one")
        then = time.time_ns() + ahead_s * 10**9
        os.utime(model, ns=(then, then))
        loaded = stamp(model)
        assert weights.weights_digest(model, loaded)
        model.write_bytes(b"two")
        os.utime(model, ns=(then, then))
        with pytest.raises(OSError, match="changed after they were loaded"):
            weights.weights_digest(model, loaded)


def test_copies_are_the_same_and_one_bit_is_another_model(tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(MODEL_DIR, copy)
    assert weights_digest(copy) == weights_digest(MODEL_DIR)
    (copy / "tokenizer_config.json").write_text("{}")
    assert weights_digest(copy) == weights_digest(MODEL_DIR), "it does not matter to keys and values"
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    changed = weights_digest(copy)
    assert changed != weights_digest(MODEL_DIR)
    config = copy / "config.json"
    config.write_text(config.read_text().replace("10000.0", "10001.0"))
    assert weights_digest(copy) not in (changed, weights_digest(MODEL_DIR))


def test_a_file_is_its_content(tmp_path) -> None:
    for name, content in (("a.gguf", b"one"), ("b.gguf", b"one"), ("c.gguf", b"two")):
        (tmp_path / name).write_bytes(content)
    digests = [weights_digest(tmp_path / name) for name in ("a.gguf", "b.gguf", "c.gguf")]
    assert digests[0] == digests[1] != digests[2]


def test_it_stops_when_it_is_told_to_and_says_nothing_of_files_that_change_meanwhile(tmp_path) -> None:
    model = tmp_path / "a.gguf"
    model.write_bytes(b"one")

    def change() -> bool:
        os.utime(model, ns=(1, 1))
        return False

    with pytest.raises(OSError, match="stopped"):
        weights_digest(model, lambda: True)
    with pytest.raises(OSError, match="changed"):
        weights_digest(model, change)
    assert weights_digest(model)
