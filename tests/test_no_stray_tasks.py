"""Tasks are started in one place: one that is started elsewhere can end without anybody noticing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = [
    ROOT / "shared/ryzanstein",
    ROOT / "clients/python/ryzanstein",
    *(ROOT / "services/ryzanstein" / name for name in ("router", "orchestrator", "worker", "cli", "console")),
]
STARTS = {"create_task", "ensure_future", "TaskGroup", "run_coroutine_threadsafe"}

# How many a module may start by itself, and why nobody can miss their ends.
ALLOWED = {
    "services/ryzanstein/router/core/embeddings.py": (2, "a task group awaits the parts of a request"),
    "services/ryzanstein/worker/agent/faces/embeddings.py": (2, "a task group awaits the inputs of a request"),
    "clients/python/ryzanstein/client/drivers/aio.py": (1, "asks for routers, which may fail; ends with the client"),
    "services/ryzanstein/cli/watch/sampling.py": (1, "what it ends with is the answer, or ends with the watch"),
    "shared/ryzanstein/process/background.py": (3, "the one place; the two futures of `until` are looked at there"),
    "services/ryzanstein/router/faces/http/generate.py": (1, "end with the call, which raises what the first raised"),
    "services/ryzanstein/router/faces/http/stream.py": (1, "sends comments only, and ends with its stream"),
    "services/ryzanstein/router/faces/http/late.py": (1, "ends with the call or the response, which raise what it raised"),
    "services/ryzanstein/router/faces/http/merged.py": (1, "put what they end with into the queue that is read"),
    "services/ryzanstein/router/faces/http/serving/presence.py": (
        2,
        "both end with the call, which raises what the work raised",
    ),
    "services/ryzanstein/router/faces/http/serving/server.py": (1, "`start` and `live` raise what it ended with"),
    "shared/ryzanstein/rpc/tls/listener.py": (1, "counts and logs whatever ends a handshake"),
    "services/ryzanstein/router/access/live.py": (1, "ends with the stream, which raises what it ended with"),
    "services/ryzanstein/router/core/peers.py": (1, "ends with the call, which raises what it ended with"),
    "shared/ryzanstein/rpc/http2/serving/server.py": (1, "logs whatever ends a handler, and ends its call"),
    "services/ryzanstein/worker/ranks/group.py": (1, "its end is the group's, see `_on_unwatched`"),
    "services/ryzanstein/worker/ranks/starting/shared_server.py": (1, "logs what it ended with, see `_on_ended`"),
    "services/ryzanstein/worker/engines/child/group.py": (2, "end with `start` or the group, which the watch's failure loses"),
    "services/ryzanstein/worker/engines/child/server.py": (1, "the exit of a process, which its watch waits for"),
    "services/ryzanstein/worker/engines/remote/group.py": (1, "whatever ends it loses the group, see `_on_end`"),
    "services/ryzanstein/worker/engines/remote/answers/preparing.py": (1, "the choices that wait for it fail with it"),
    "services/ryzanstein/worker/engines/remote/answers/streams.py": (1, "whatever ends it loses the group, see `_on_done`"),
    "services/ryzanstein/worker/agent/pages/mover.py": (1, "ends with the call, which raises what it ended with"),
    "services/ryzanstein/cli/chat/talk.py": (1, "whoever reads the answer sees what became of the cancellation"),
    "services/ryzanstein/worker/supervision/supervisor.py": (1, "awaited where it is started, also when that is cancelled"),
}


def _modules() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in folder.rglob("*.py") if "v1" not in path.parts)


def _starts(path: Path) -> int:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls)
    return sum(name in STARTS for name in names)


def test_no_module_starts_a_task_whose_end_could_be_missed() -> None:
    """Use `Background.supervise` or `Background.once` of `ryzanstein.process.background`."""
    found = Counter({str(path.relative_to(ROOT)): _starts(path) for path in _modules()})
    assert {path: count for path, count in found.items() if count} == {path: count for path, (count, _) in ALLOWED.items()}
