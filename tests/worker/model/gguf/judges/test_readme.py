"""The README's three lines, with addresses and an environment of our own: a real model, served from its file."""

import json
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[5]
(BLOCK,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
INSTALL, SERVE, ASK = BLOCK.splitlines()
URL = "http://127.0.0.1:8000"
WITHIN_S = 300


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs the first two lines, and returns the address of the HTTP face."""
    folder = tmp_path_factory.mktemp("readme")
    install = INSTALL.replace(".venv/bin/", f"{ROOT}/build/judges/bin/")
    subprocess.run(["bash", "-c", install], cwd=folder, check=True, capture_output=True, timeout=WITHIN_S)
    program, *words = shlex.split(SERVE)
    assert program == ".venv/bin/ryzanstein"
    ports = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]
    command = [
        str(Path(sys.executable).with_name("ryzanstein")),
        *words,
        "--json",
        *ports,
        "--state-dir",
        str(folder / "state"),
    ]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            yield _addresses(process, folder / "log")["http"][0]
        finally:
            process.terminate()
            process.wait(60)


def _addresses(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Returns what `--json` prints when everything is ready. A process that ends closes its output."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == b"}\n":
            return dict(json.loads(b"".join(lines)))
    pytest.fail(f"`ryzanstein up` ended: {log.read_text()}")


def test_a_real_model_answers(url: str) -> None:
    done = subprocess.run(shlex.split(ASK.replace(URL, url)), capture_output=True, text=True, timeout=WITHIN_S, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["text"].startswith(" Thursday, Friday")
    assert 0 < answer["usage"]["completion_tokens"] <= 8


def test_a_chat_with_a_model_that_has_no_template_is_refused_by_reason(url: str) -> None:
    body: dict[str, Any] = {"model": "gemma", "messages": [{"role": "user", "content": "Hello"}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as response:
        assert response.code == 400
        assert json.load(response)["error"]["code"] == "no_chat_template"
