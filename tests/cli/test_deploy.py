"""`ryzanstein deploy` as a person runs it, on a cluster that `ryzanstein up` started, and called wrongly."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import Result
from typer.testing import CliRunner

from ryzanstein.cli.main import build
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "models.md").read_text()
COMMAND_S = 60.0
RYZANSTEIN = str(Path(sys.executable).with_name("ryzanstein"))
FREE_PORTS = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build(), list(arguments), env={"COLUMNS": "200"})


def plain(text: str) -> str:
    """A usage error without its frame."""
    return " ".join(text.replace("│", "").split())


@dataclass(frozen=True)
class DeployedCluster:
    """Two nodes of one rank, started with the model `demo`, and a model `second` that answers as `demo` does."""

    router: str
    orchestrator: str
    second: Path

    def deploy(self, *arguments: str) -> Result:
        return run("deploy", *arguments, "--orchestrator", self.orchestrator)

    def run_line(self, line: str) -> str:
        """What a command of the page prints, with the addresses and the directory of this cluster."""
        name, *arguments = shlex.split(line.replace("/models/second", str(self.second)))
        where = ("--router", self.router) if name == "chat" else ("--orchestrator", self.orchestrator)
        done = run(name, *where, *arguments)
        assert done.exit_code == 0, done.output
        return done.output

    def listed(self) -> dict[str, Any]:
        done = self.deploy("--list", "--json")
        assert done.exit_code == 0, done.output
        return {each["model"]: each for each in json.loads(done.stdout)["deployments"]}

    def status(self) -> Any:
        done = run("status", "--json", "--router", self.router, "--orchestrator", self.orchestrator)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def copy(self, name: str) -> Path:
        """Another directory with the files of `second`."""
        return Path(shutil.copytree(self.second, self.second.with_name(name)))

    def ready(self) -> dict[str, int]:
        """How many nodes serve each model, as the router sees it."""
        with grpc.insecure_channel(self.router) as channel:
            stub = inference_grpc.InferenceServiceStub(channel)
            models = stub.ListModels(inference.ListModelsRequest(), timeout=10).models
        return {model.name: model.ready_nodes for model in models}

    def wait_ready(self, **wanted: int) -> None:
        deadline = time.monotonic() + COMMAND_S
        while (seen := self.ready()) != wanted:
            assert time.monotonic() < deadline, f"the router sees {seen}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedCluster]:
    folder = tmp_path_factory.mktemp("deploy")
    second = folder / "second"
    shutil.copytree(MODEL_DIR, second, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    arguments = ("up", "--json", "--nodes", "2", "--tp", "1", "--state-dir", str(folder / "state"), *FREE_PORTS)
    with (folder / "up.log").open("w") as errors:
        process = subprocess.Popen([RYZANSTEIN, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                break
        assert lines, (folder / "up.log").read_text()
        addresses = json.loads("".join(lines))
        yield DeployedCluster(addresses["grpc"][0], addresses["orchestrator"], second)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def chat(router: str, model: str, seed: int, nodes: set[str] | None = None) -> list[int]:
    """The token ids of a sampled answer. Asserts that none is lost or repeated. Adds to `nodes` who generated them."""
    request = inference.ChatRequest(
        model=model,
        messages=[inference.Message(role=inference.ROLE_USER, content="Hello!")],
        sampling=inference.SamplingParams(temperature=2.0, seed=seed, max_tokens=200, ignore_eos=True),
    )
    tokens: list[int] = []
    finished = 0
    with grpc.insecure_channel(router, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        for response in stub.StreamChat(inference.StreamChatRequest(chat=request), timeout=COMMAND_S):
            kind = response.event.WhichOneof("kind")
            if kind == "delta":
                assert response.event.delta.first_index == len(tokens), "a token was lost or repeated"
                tokens += response.event.delta.token_ids
                if nodes is not None:
                    nodes.add(response.event.delta.node_id)
            finished += kind == "finished"
    assert finished == 1
    return tokens


class Streams:
    """Clients that ask a model without a pause, each with seeds of its own, and compare with undisturbed answers."""

    SEEDS = range(1, 4)

    def __init__(self, router: str, model: str) -> None:
        self._router, self._model = router, model
        self._expected = {seed: chat(router, model, seed) for seed in self.SEEDS}
        assert len({tuple(tokens) for tokens in self._expected.values()}) == len(self._expected)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in self.SEEDS]
        self.answered = 0
        self.nodes: set[str] = set()
        self.failures: list[str] = []

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        while not self._stop.is_set():
            try:
                tokens = chat(self._router, self._model, seed, self.nodes)
            except (grpc.RpcError, AssertionError) as error:
                self.failures.append(repr(error))
                return
            if tokens != self._expected[seed]:
                self.failures.append(f"another answer for seed {seed}")
            self.answered += 1


@pytest.mark.cluster
def test_nothing_is_deployed_at_first(cluster: DeployedCluster) -> None:
    done = cluster.deploy("--list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "nothing is deployed: each node serves what it was started with\n"
    assert cluster.listed() == {}


@pytest.mark.cluster
def test_a_deployment_is_served_beside_what_the_node_has_and_disturbs_no_answer(cluster: DeployedCluster) -> None:
    with Streams(cluster.router, "demo") as streams:
        done = cluster.deploy(str(cluster.second), "--nodes", "1")
        cluster.wait_ready(demo=2, second=1)
    assert streams.failures == []
    assert streams.answered > len(streams.SEEDS)
    assert done.exit_code == 0, done.output
    first, assigned, *loads, ready, last = done.stderr.splitlines()
    node = assigned.partition(" ")[0]
    assert first == f"deploying 'second' from {cluster.second}"
    assert (assigned, ready) == (f"{node} is assigned", f"{node} is ready")
    assert loads in ([f"{node} loads"], []), "it may be too short to be seen"
    assert last == f"'second' is ready on 1 of 1 node: {node}"


@pytest.mark.cluster
def test_both_models_answer_and_the_list_names_the_new_one(cluster: DeployedCluster) -> None:
    assert chat(cluster.router, "second", 1) == chat(cluster.router, "demo", 1)
    second = cluster.listed()["second"]
    assert (second["path"], second["wanted"], second["revision"]) == (str(cluster.second), 1, 1)
    assert (second["idle_unload_s"], second["outdated_nodes"]) == (0.0, [])
    assert len(second["assigned_nodes"]) == 1
    assert second["assigned_nodes"] == second["ready_nodes"]
    table = cluster.deploy("--list").stdout
    for visible in ("second", str(cluster.second), "assigned nodes", second["ready_nodes"][0]):
        assert visible in table


@pytest.mark.cluster
def test_the_commands_of_the_page_work_and_the_same_deployment_again_changes_nothing(cluster: DeployedCluster) -> None:
    *lines, last = re.findall(r"^ryzanstein (.*)$", PAGE, re.MULTILINE)
    assert last == "deploy second --remove", "the next test runs it"
    outputs = [cluster.run_line(line) for line in lines]
    assert "loads" not in outputs[0]
    assert str(cluster.second) in outputs[1]
    assert outputs[2].startswith("1 2 3 4 5\n")


@pytest.mark.cluster
def test_the_status_names_every_model_of_a_node_with_its_memory(cluster: DeployedCluster) -> None:
    (node,) = cluster.listed()["second"]["assigned_nodes"]
    visible = {each["node"]["node_id"]: each for each in cluster.status()["nodes"]}
    members = [each for each in visible.values() if not each["further"]]
    assert len(members) == 2
    assert all(each["node"]["memory_bytes"] > 0 for each in members)
    (second,) = [each for each in visible.values() if each["node"]["model"] == "second"]
    assert second["node"]["node_id"] in {node, f"{node}/second"}
    assert second["report"]["state"] == "READY"
    assert second["report"]["memory_bytes"] > 0
    assert {report["model"] for report in visible[node]["node"]["models"]} == {"demo", "second"}


@pytest.mark.cluster
def test_a_new_version_takes_the_place_of_the_earlier_one_on_one_node_after_the_other(cluster: DeployedCluster) -> None:
    assert cluster.deploy(str(cluster.second)).exit_code == 0
    cluster.wait_ready(demo=2, second=2)
    before = cluster.listed()["second"]["revision"]
    newer = cluster.copy("second-newer")
    with Streams(cluster.router, "second") as streams:
        done = cluster.deploy(str(newer), "--name", "second")
        after = cluster.listed()["second"]
    assert streams.failures == []
    assert streams.answered > 0
    assert done.exit_code == 0, done.output
    assert (after["path"], after["revision"]) == (str(newer), before + 1)
    assert sorted(after["ready_nodes"]) == ["node-0", "node-1"]
    ready = [line for line in done.stderr.splitlines() if line.endswith(" is ready")]
    assert sorted(ready) == ["node-0 is ready", "node-1 is ready"]


@pytest.mark.cluster
def test_reload_is_a_new_revision_of_the_same_directory(cluster: DeployedCluster) -> None:
    before = cluster.listed()["second"]
    done = cluster.deploy(before["path"], "--name", "second", "--reload")
    assert done.exit_code == 0, done.output
    assert cluster.listed()["second"]["revision"] == before["revision"] + 1


@pytest.mark.cluster
def test_a_version_that_a_node_refuses_leaves_the_earlier_one_everywhere(cluster: DeployedCluster) -> None:
    expected, before = chat(cluster.router, "second", 1), cluster.listed()["second"]
    broken = cluster.copy("broken")
    (broken / "tokenizer.json").write_text("{}")  # which is read only when the model is loaded
    done = cluster.deploy(str(broken), "--name", "second", "--wait", "60")
    assert done.exit_code == 1
    last = done.stderr.splitlines()[-1]
    assert "refused it and goes on with the earlier version: " in last, done.stderr
    assert str(broken) in last
    assert last.endswith("; repair it and deploy it with --reload, or return to the earlier directory with --rollback")
    listed = cluster.listed()["second"]
    assert (len(listed["outdated_nodes"]), listed["halted"]) == (2, True)
    assert cluster.ready() == {"demo": 2, "second": 2}
    assert chat(cluster.router, "second", 1) == expected
    done = cluster.deploy("second", "--rollback")
    assert done.exit_code == 0, done.output
    assert f"rolling back 'second' to {before['path']}" in done.stderr
    listed = cluster.listed()["second"]
    assert (listed["path"], listed["revision"], listed["halted"]) == (before["path"], before["revision"] + 2, False)
    assert cluster.deploy(str(cluster.second)).exit_code == 0


@pytest.mark.cluster
def test_an_idle_model_sleeps_and_a_request_wakes_it(cluster: DeployedCluster) -> None:
    done = cluster.deploy(str(cluster.second), "--nodes", "1", "--idle-unload", "1")
    assert done.exit_code == 0, done.output
    assert cluster.listed()["second"]["idle_unload_s"] == 1.0
    expected = chat(cluster.router, "demo", 7)
    deadline = time.monotonic() + COMMAND_S
    while not any(each["report"]["asleep"] for each in cluster.status()["nodes"] if each["report"]["model"] == "second"):
        assert time.monotonic() < deadline, "it did not go to sleep"
        time.sleep(0.2)
    assert " asleep " in run("status", "--router", cluster.router, "--orchestrator", cluster.orchestrator).stdout
    assert chat(cluster.router, "second", 7) == expected


@pytest.mark.cluster
def test_a_removed_model_leaves_its_nodes(cluster: DeployedCluster) -> None:
    (node,) = cluster.listed()["second"]["assigned_nodes"]
    done = cluster.deploy("second", "--remove")
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"'second' is removed from {node};")
    cluster.wait_ready(demo=2)
    assert cluster.listed() == {}
    again = cluster.deploy("second", "--remove")
    assert again.exit_code == 1
    assert again.stderr == "error: no such deployment: 'second' (NOT_FOUND, DEPLOYMENT_NOT_FOUND)\n"


@pytest.mark.cluster
def test_what_no_node_can_read_is_refused_with_the_nodes_own_reason_and_not_stored(cluster: DeployedCluster) -> None:
    done = cluster.deploy("/no/such/model", "--nodes", "1", "--wait", "30")
    assert done.exit_code == 1
    assert "/no/such/model/config.json: No such file or directory" in done.stderr
    assert "(FAILED_PRECONDITION, MODEL_REFUSED)" in done.stderr
    assert cluster.listed() == {}
    assert cluster.ready() == {"demo": 2}


@pytest.mark.cluster
def test_ctrl_c_leaves_the_deployment_in_force_and_says_so(cluster: DeployedCluster, interruptible: None) -> None:
    command = [RYZANSTEIN, "deploy", str(cluster.second), "--nodes", "1", "--orchestrator", cluster.orchestrator]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.endswith(" is assigned\n"):
                break
        process.send_signal(signal.SIGINT)
        message = process.stderr.read()
        assert process.wait(COMMAND_S) == 130
    last = message.splitlines()[-1]
    assert last == "'second' stays deployed, ready on 0 of 1 node; `ryzanstein deploy second --remove` withdraws it"
    assert cluster.listed().keys() == {"second"}


@pytest.mark.cluster
def test_without_waiting_it_returns_when_the_deployment_is_stored(cluster: DeployedCluster) -> None:
    done = cluster.deploy(str(cluster.second), "--name", "third", "--nodes", "3", "--no-wait")
    assert done.exit_code == 0, done.output
    assert len(done.stderr.splitlines()) == 2
    assert cluster.listed()["third"]["wanted"] == 3
    late = cluster.deploy(str(cluster.second), "--name", "third", "--nodes", "3")
    assert late.exit_code == 0, late.output
    last = late.stderr.splitlines()[-1]
    assert last == "'third' is ready on 2 of 3 nodes, no free node (the cluster has 2): node-0, node-1"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would the commands that are started here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def directory_without_config(folder: Path) -> str:
    return str(folder)


def file_of_weights(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("made", "why"),
    [(directory_without_config, "has no config.json"), (file_of_weights, "is neither a directory nor a GGUF file")],
)
def test_what_is_no_model_here_is_refused_before_any_node_loses_its_model(
    made: Callable[[Path], str], why: str, tmp_path: Path
) -> None:
    done = run("deploy", made(tmp_path))
    assert done.exit_code == 2
    assert f"'DIR|NAME': {made(tmp_path)} {why}; --force" in plain(done.output)


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        ((), "'DIR|NAME'", "give the directory of a model, or --list"),
        (("",), "'DIR|NAME'", "give the directory of a model, or --list"),
        (("/", "--force"), "'--name'", "must have 1 to 128 characters, got 0"),
        (("/m", "--name", "n" * 129), "'--name'", "must have 1 to 128 characters, got 129"),
        (("/m", "--name", ""), "'--name'", "must have 1 to 128 characters, got 0"),
        (("/m", "--name", "\udcff"), "'--name'", "must be UTF-8 text"),
        (("/m\udcff",), "'DIR|NAME'", "must be UTF-8 text"),
        (("/" + "m" * 1024,), "'DIR|NAME'", "must have at most 1024 characters, got 1025"),
        (("/m", "--nodes", "-1"), "'--nodes'", "Input should be greater than or equal to 0"),
        (("/m", "--nodes", "10001"), "'--nodes'", "Input should be less than or equal to 10000"),
        (("/m", "--idle-unload", "-1"), "'--idle-unload'", "Input should be greater than or equal to 0"),
        (("/m", "--idle-unload", "3e6"), "'--idle-unload'", "Input should be less than or equal to 2592000"),
        (("m", "--remove", "--idle-unload", "0"), "'--idle-unload'", "has no meaning with --remove"),
        (("--list", "--reload"), "'--reload'", "has no meaning with --list"),
        (("/m", "--wait", "-1"), "'--wait'", "Input should be greater than or equal to 0"),
        (("/m", "--wait", "1", "--no-wait"), "'--no-wait'", "contradicts --wait"),
        (("/m", "--json"), "'--json'", "is for --list"),
        (("/m", "--orchestrator", "nowhere"), "'--orchestrator'", "must be host:port"),
        (("--remove",), "'DIR|NAME'", "must have 1 to 128 characters, got 0"),
        (("m", "--remove", "--nodes", "0"), "'--nodes'", "has no meaning with --remove"),
        (("m", "--list"), "'DIR|NAME'", "has no meaning with --list"),
        (("--list", "--remove"), "'--remove'", "has no meaning with --list"),
    ],
)
def test_a_wrong_call_is_exit_code_2_and_names_the_option_and_its_bound(
    arguments: tuple[str, ...], option: str, message: str
) -> None:
    done = run("deploy", *arguments)
    assert done.exit_code == 2, done.output
    assert option in done.output
    assert message in plain(done.output)


@pytest.mark.parametrize("arguments", [("/m",), ("m", "--remove"), ("--list",), ("--list", "--json")])
def test_an_orchestrator_that_is_away_is_one_sentence_and_exit_code_1(arguments: tuple[str, ...]) -> None:
    done = run("deploy", *arguments, "--orchestrator", f"127.0.0.1:{free_ports(1)[0]}")
    assert (done.exit_code, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: failed to connect")
    assert hint == "  is the cluster running? `ryzanstein up` starts one"


def test_the_help_says_that_the_nodes_read_the_directory() -> None:
    assert "The nodes read the directory, so it must be there on each of them." in plain(run("deploy", "--help").output)
