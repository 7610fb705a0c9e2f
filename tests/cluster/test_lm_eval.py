"""lm-evaluation-harness, unchanged, against the HTTP face. `bash .ci/parts lm-eval` installs it, apart from ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from ryzanstein.demo import MODEL_DIR

PYTHON = Path(__file__).parents[2] / "build/lm_eval/bin/python"
TASK = Path(__file__).parent / "lm_eval"


def test_local_completions_scores_the_answers_that_the_model_knows(calm: Any, tmp_path: Path) -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: `bash .ci/parts lm-eval` installs lm-evaluation-harness for this test"
    text = (TASK / "counting.yaml").read_text().replace("DATA", str(TASK / "counting.jsonl"))
    (tmp_path / "counting.yaml").write_text(text)
    url = f"{calm.cluster.http_url}/v1/completions"
    model = f"model=demo,base_url={url},tokenizer={MODEL_DIR},num_concurrent=2,max_retries=1"
    command = [str(PYTHON), "-m", "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", "counting"]
    command += ["--include_path", str(tmp_path), "--batch_size", "4", "--output_path", str(tmp_path / "out")]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=offline)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["counting"]["acc,none"] == 1.0
