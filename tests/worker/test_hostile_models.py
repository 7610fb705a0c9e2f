"""A node that is told to load directories that somebody broke: FAILED with the reason, no traceback, no rank lost, no wait."""

import json
import os
import shutil
import struct
from pathlib import Path

import grpc
import pytest

from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = pytest.mark.cluster

WITHIN_S = 30.0
"""Two seconds are meant, one of which a rank takes to start; a machine that runs other tests as well takes longer."""


def _config(model_dir: Path, **changes: object) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _deep_header(model_dir: Path) -> None:
    text = b"[" * 100_000
    for path in model_dir.glob("*.safetensors"):
        path.write_bytes(struct.pack("<Q", len(text)) + text)


def _pipe(model_dir: Path, name: str) -> None:
    (model_dir / name).unlink(missing_ok=True)
    os.mkfifo(model_dir / name)


BROKEN = {
    "a deep header": (_deep_header, "nested too deeply"),
    "many layers": (lambda model_dir: _config(model_dir, num_hidden_layers=10**9), "num_hidden_layers must be at most 4096"),
    "a deep config": (lambda model_dir: (model_dir / "config.json").write_text("[" * 10**5), "nested too deeply"),
    "eos is a word": (lambda model_dir: _config(model_dir, eos_token_id="abc"), "eos_token_id must be a token id"),
    "text_config is a string": (lambda model_dir: _config(model_dir, text_config="x"), "text_config must be an object"),
    "half a character": (lambda model_dir: _config(model_dir, model_type="\ud800"), "model_type"),
    "a pipe": (lambda model_dir: _pipe(model_dir, "model.safetensors"), "not a regular file"),
    "a pipe beside": (lambda model_dir: _pipe(model_dir, "generation_config.json"), "not a regular file"),
    "quantized": (lambda model_dir: _config(model_dir, quantization_config={"quant_method": "aqlm"}), "quant_method 'aqlm'"),
    "a tokenizer of garbage": (
        lambda model_dir: (model_dir / "tokenizer.json").write_bytes(bytes(range(256))),
        "tokenizer.json",
    ),
}


async def test_whatever_the_directory_the_node_says_why_and_lives(start_node, demo_dir, tmp_path):
    node = start_node(tp=1)
    node.wait_event("ranks ready")
    async with open_channel(node.address) as channel:
        stub = WorkerServiceStub(channel)
        for name, (breaks, reason) in BROKEN.items():
            model_dir = tmp_path / name.replace(" ", "-")
            shutil.copytree(demo_dir, model_dir, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
            breaks(model_dir)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.LoadModel(pb.LoadModelRequest(model="broken", path=str(model_dir)), timeout=WITHIN_S)
            error = error_from_rpc(caught.value)
            assert error.reason in ("MODEL_INVALID", "MODEL_REFUSED"), (name, error)
            assert reason in error.message
            assert len(error.message) < 1200
            status = await stub.GetStatus(pb.GetStatusRequest())
            assert (status.beat.state, status.rank_restarts) == (pb.NODE_STATE_FAILED, 0), name
        await stub.LoadModel(pb.LoadModelRequest(model="demo", path=str(demo_dir)))
        assert (await stub.GetStatus(pb.GetStatusRequest())).beat.state == pb.NODE_STATE_READY
    log = node.log_path.read_text()
    assert "Traceback" not in log
    assert all(line.startswith("{") for line in log.splitlines()), log[-2000:]
