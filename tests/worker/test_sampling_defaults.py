"""A node says in its beats which sampling values its model has of its own, unless it is told not to use them."""

from __future__ import annotations

import json
import shutil

import pytest

from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long


@pytest.mark.parametrize("setting", ["auto", "none"])
async def test_beats_have_the_models_own_values(start_node, connect, demo_dir, tmp_path, setting):
    model = tmp_path / "demo"
    shutil.copytree(demo_dir, model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.6, "top_k": 20}))
    node = start_node("--generation-config", setting, model=model, tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        beat = link.hello.beat
    assert beat.HasField("sampling_defaults") is (setting == "auto")
    if setting == "auto":
        assert beat.sampling_defaults == inference.SamplingDefaults(temperature=0.6, top_k=20)
