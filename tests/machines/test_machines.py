"""Each machine ends in a working answer, or in one sentence that names the remedy."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.host import Host
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import serves
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.machines.clocks import Clocks

Machine = Any  # tests/machines/conftest.py
EndsIn = Callable[[str, str, str], None]
RYZANSTEIN = str(Path(sys.executable).with_name("ryzanstein"))
UP, DEMO = "ryzanstein up", "ryzanstein demo"
COUNTED = "1 2 3 4 5 6 7 8 9"
STRANGER = 12345


def answer_of(machine: Machine, *arguments: str) -> str:
    """Serves on this machine, asks, ends without a trace, and returns the answer."""
    with machine.up(*arguments) as cluster:
        return str(cluster.ask())


def with_mounts(machine: Machine, *mounts: str) -> Machine:
    """The machine with other file systems in a mount namespace of its own."""
    script = " && ".join((*mounts, 'exec "$@"'))
    return replace(machine, prefix=("unshare", "--mount", "sh", "-c", script, "sh", *machine.prefix))


def stranger(machine: Machine, **variables: str | None) -> Machine:
    """The machine as a user without an entry in passwd, who may read everything."""
    reading = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--bounding-set=-all,+dac_read_search")
    ids = ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", *reading)
    return replace(machine, prefix=ids, variables={**machine.variables, "USER": None, "LOGNAME": None, **variables})


def test_an_empty_cache(machine: Machine, home: Path, ends_in: EndsIn) -> None:
    shutil.rmtree(home / ".cache")
    with machine.popen("demo") as process:
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    assert re.search(r"compiled kernels, once: \d+ s", out + err)
    assert "13 of 13" in out
    assert [path.suffix for path in (home / ".cache/ryzanstein/kernels").iterdir()] == [".so"]
    ends_in("empty caches", DEMO, "13 of 13 promises kept; kernels are compiled once")


@pytest.mark.parametrize("compiler", ["/nonexistent", "false"])
def test_no_compiler(machine: Machine, home: Path, ends_in: EndsIn, compiler: str) -> None:
    shutil.rmtree(home / ".cache")
    here = replace(machine, variables={**machine.variables, "CC": compiler})
    done = here.run("demo")
    assert done.code == 0, done.out + done.err
    message = (done.out + done.err).replace("\n", " ")
    assert re.search(r"no kernels: .*answers take longer without them; install a C compiler", message)
    ends_in(f"no compiler (`CC={compiler}`)", DEMO, "13 of 13 promises kept; it says that there are no kernels, and the remedy")


@pytest.mark.usefixtures("root")
def test_a_home_that_cannot_be_written(machine: Machine, home: Path, ends_in: EndsIn) -> None:
    here = stranger(machine, HOME=str(home))
    done = here.run("up")
    assert done.code == 1
    assert "--state-dir" in done.sentence
    ends_in("a home that cannot be written", UP, "one sentence that names `--state-dir`")
    assert here.run("demo").code == 0
    ends_in("a home that cannot be written", DEMO, "13 of 13 promises kept; kernels are cached in the temporary folder")


@pytest.mark.usefixtures("root")
def test_no_home_and_no_entry_in_passwd(machine: Machine, ends_in: EndsIn) -> None:
    here = stranger(machine, HOME=None)
    assert re.fullmatch(r"ryzanstein \d+\.\d+\.\d+\n", here.run("--version").out)
    assert here.run("status").code == 1
    done = here.run("demo")
    assert done.code == 0, done.out + done.err
    ends_in("no home, a user without an entry in passwd", DEMO, "13 of 13 promises kept")


def test_umask_077(machine: Machine, home: Path, ends_in: EndsIn) -> None:
    assert COUNTED in answer_of(replace(machine, prefix=("sh", "-c", 'umask 077 && exec "$@"', "sh")))
    modes = {path.stat().st_mode & 0o077 for path in (home / "state").rglob("*")}
    assert modes <= {0}
    ends_in("umask 077", UP, "an answer")


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_a_plain_locale(machine: Machine, ends_in: EndsIn, locale: str) -> None:
    variables = {"LANG": locale, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = replace(machine, variables={**machine.variables, **variables}).run("demo")
    assert done.code == 0, done.out + done.err
    assert "Traceback" not in done.err
    ends_in(f"`LC_ALL={locale}`", DEMO, "13 of 13 promises kept")


@contextmanager
def counting_proxy() -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that refuses, and what was asked of it."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(4096))
                    connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


NO_PROXIES = {"none": {}, "no_proxy": {"no_proxy": "127.0.0.1,localhost"}, "NO_PROXY": {"NO_PROXY": "example.com"}}


@pytest.mark.parametrize("exceptions", NO_PROXIES)
def test_proxies(machine: Machine, ends_in: EndsIn, exceptions: str) -> None:
    with counting_proxy() as (url, asked):
        names = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
        variables = {spelled: url for name in names for spelled in (name, name.upper())} | NO_PROXIES[exceptions]
        here = replace(machine, variables={**machine.variables, "no_proxy": None, "NO_PROXY": None, **variables})
        if exceptions == "none":
            done = here.run("demo")
            assert done.code == 0, done.out + done.err
        else:
            assert COUNTED in answer_of(here)
    assert asked == []
    which = "without exceptions" if exceptions == "none" else f"with `{exceptions}`"
    message = "13 of 13 promises kept" if exceptions == "none" else "an answer"
    ends_in(f"proxies in eight spellings, {which}", DEMO if exceptions == "none" else UP, f"{message}; no proxy was asked")


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("where", ["/tmp", "/dev/shm"])
def test_a_folder_of_64_kib(machine: Machine, tmp_path: Path, ends_in: EndsIn, where: str) -> None:
    keep = tmp_path.parents[0]
    kept = f"mkdir -p /run/kept && mount --bind {keep} /run/kept"
    back = f"mkdir -p {keep} && mount --bind /run/kept {keep}"
    small = f"mount -t tmpfs -o size=64k tmpfs {where}"
    fill = "head -c 1M /dev/zero > /tmp/full 2>/dev/null || true"
    mounts = (kept, small, back, fill) if where == "/tmp" else (small,)
    done = with_mounts(machine, *mounts).run("demo")
    assert done.code == 0, done.out + done.err
    ends_in("a full `/tmp`" if where == "/tmp" else "64 KiB of `/dev/shm`", DEMO, "13 of 13 promises kept")


@pytest.mark.usefixtures("root")
def test_no_temporary_folder(machine: Machine, tmp_path: Path, ends_in: EndsIn) -> None:
    """Neither the usual ones nor the current folder can be written."""
    full = [f"mount -t tmpfs -o size=64k,ro tmpfs {where}" for where in ("/tmp", "/var/tmp")]
    unset = dict.fromkeys(("TMPDIR", "TEMP", "TMP"))
    here = replace(with_mounts(machine, *full), cwd=Path("/proc"), variables={**machine.variables, **unset})
    done = here.run("demo")
    assert done.code == 1, done.out + done.err
    assert "TMPDIR" in done.sentence
    ends_in("no temporary folder", DEMO, "one sentence that names `TMPDIR`")


def test_one_core(machine: Machine, ends_in: EndsIn) -> None:
    done = replace(machine, prefix=("taskset", "-c", str(min(os.sched_getaffinity(0))))).run("demo")
    assert done.code == 0, done.out + done.err
    ends_in("one core", DEMO, "13 of 13 promises kept")


@pytest.fixture
def half_a_core() -> Iterator[list[str]]:
    """The files of control groups (version 1 or 2) of half a core and 1 GiB, to which a process is added."""
    name, made = f"ryzanstein-test-{os.getpid()}", []
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    places = (
        {Path("/sys/fs/cgroup"): {"cpu.max": "50000 100000", "memory.max": str(2**30)}}
        if v2
        else {
            Path("/sys/fs/cgroup/cpu"): {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"},
            Path("/sys/fs/cgroup/memory"): {"memory.limit_in_bytes": str(2**30)},
        }
    )
    try:
        for place, limits in places.items():
            (place / name).mkdir()
            made.append(place / name)
            for file, limit in limits.items():
                (place / name / file).write_text(limit)
    except OSError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"control groups cannot be made here: {error}")
    yield [str(group / "cgroup.procs") for group in made]
    for group in made:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


@pytest.mark.usefixtures("root")
def test_half_a_core_and_1_gib(machine: Machine, half_a_core: list[str], ends_in: EndsIn) -> None:
    entering = " && ".join(f"echo $$ > {file}" for file in half_a_core)
    assert COUNTED in answer_of(replace(machine, prefix=("sh", "-c", f'{entering} && exec "$@"', "sh")))
    ends_in("half a core and 1 GiB", UP, "an answer")


HOSTILE = ("uvloop", "jinja2", "grpc", "torch", "random", "typer", "numpy", "sitecustomize", "ryzanstein_hostile")


def test_a_folder_with_hostile_modules(machine: Machine, tmp_path: Path, ends_in: EndsIn) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + chr(10))\n")
    here = replace(machine, cwd=folder)
    assert COUNTED in answer_of(here, "--model", ".")
    assert here.run("demo").code == 0
    assert not (tmp_path / "ran").exists()
    ends_in(
        "a model's folder with hostile modules as the working directory", f"{UP} --model .", "an answer; none of them is run"
    )


def test_a_folder_whose_name_has_everything(machine: Machine, tmp_path: Path, ends_in: EndsIn) -> None:
    folder = tmp_path / "a model, or=x (ü)"
    shutil.copytree(MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    assert COUNTED in answer_of(machine, "--model", str(folder))
    ends_in("a model's folder with a space, a comma and `=` in its name", UP, "an answer")


def test_a_busy_port(machine: Machine, ends_in: EndsIn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = machine.run("up", "--http-port", str(port))
    assert done.code == 1
    assert str(port) in done.sentence
    assert "--http-port" in done.sentence
    ends_in("a busy port", UP, "one sentence that names the port, its holder and the option")


def test_started_twice(machine: Machine, home: Path, ends_in: EndsIn) -> None:
    with machine.up() as cluster:
        ports = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]
        done = machine.run("up", "--state-dir", str(home / "state"), *ports)
        assert done.code == 1
        assert "--state-dir" in done.sentence
        assert COUNTED in cluster.ask()
    ends_in("started twice", UP, "one sentence that names the other process and `--state-dir`; the first serves on")


@pytest.mark.usefixtures("root")
def test_a_full_state_disk_at_the_start(machine: Machine, tmp_path: Path, ends_in: EndsIn) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    full = (f"mount -t tmpfs -o size=64k tmpfs {disk}", f"head -c 1M /dev/zero > {disk}/full 2>/dev/null || true")
    done = with_mounts(machine, *full).run("up", "--state-dir", str(disk / "state"))
    assert done.code == 1
    assert "KiB left" in done.sentence
    assert "--state-dir" in done.sentence
    ends_in("a full state disk at the start", UP, "one sentence that names the directory and `--state-dir`")


@pytest.mark.usefixtures("root")
def test_a_state_disk_that_fills_up(machine: Machine, tmp_path: Path, ends_in: EndsIn) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    here = with_mounts(machine, f"mount -t tmpfs -o size=8m tmpfs {disk}")
    here = replace(here, state_dir=str(disk))
    with here.up() as cluster:
        assert COUNTED in cluster.ask()
        inside = ("nsenter", "--mount", "--target", str(cluster.process.pid))
        subprocess.run([*inside, "sh", "-c", f"head -c 16M /dev/zero > {disk}/full 2>/dev/null"], check=False)
        for _ in range(3):
            assert COUNTED in cluster.ask()
    ends_in("a state disk that fills up during the run", UP, "answers go on")


def test_a_narrow_terminal(machine: Machine, ends_in: EndsIn) -> None:
    """`script` gives it a terminal of 40 columns."""
    here = replace(machine, variables={**machine.variables, "COLUMNS": "40", "TERM": "xterm"})
    command = ["script", "--quiet", "--return", "--command", f"stty cols 40; {RYZANSTEIN} demo", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, env=here.environment, timeout=240, check=False)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    assert "13 of 13" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout)
    ends_in("a terminal of 40 columns", DEMO, "13 of 13 promises kept")


MOMENTS_S = (0.05, 0.2, 0.5, 0.8, 1.2, 1.7, 2.3, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_ended_at_ten_moments(machine: Machine, tmp_path: Path, ends_in: EndsIn, number: signal.Signals) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    here = replace(machine, variables={**machine.variables, "TMPDIR": str(temporary)})
    for moment_s in MOMENTS_S:
        with here.popen("demo", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(moment_s)
            running = process.poll() is None
            family = psutil.Process(process.pid).children(recursive=True) if running else []
            process.send_signal(number)
            process.wait(60)
        assert process_names(family) == [], f"after {moment_s} s"
        if number is signal.SIGINT:
            assert list(temporary.iterdir()) == [], f"after {moment_s} s"
    assert here.run("demo").code == 0
    assert list(temporary.iterdir()) == [], "what killed ones left is removed by the next one"
    name = "Ctrl-C" if number is signal.SIGINT else "SIGKILL"
    ends_in(f"{name} at ten moments of the start and the run", DEMO, "no process, folder or segment is left after the next one")


def process_names(family: list[psutil.Process]) -> list[str]:
    """Who of these processes runs on, a moment later."""
    _, alive = psutil.wait_procs(family, timeout=20)
    return [" ".join(each.cmdline()) for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_sigkill_while_kernels_compile(machine: Machine, home: Path, ends_in: EndsIn) -> None:
    folder = home / ".cache/ryzanstein/kernels"
    shutil.rmtree(folder)
    with machine.popen("demo", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(folder.glob("tmp*/*.s")) and process.poll() is None:
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
    assert process_names(family) == []
    assert list(folder.iterdir()) == []
    ends_in("SIGKILL while kernels are compiled", DEMO, "no compiler and no folder is left")


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_ipv6(machine: Machine, ends_in: EndsIn, host: str) -> None:
    """A node on an IPv6 address, asked by the command line; `tests/cli/test_processes.py` has a whole cluster."""
    grpc_port, metrics_port = map(str, free_ports(2))
    ports = ("--grpc-port", grpc_port, "--metrics-port", metrics_port)
    exposed = ("--insecure",) if host == "::" else ()
    command = ("worker", "--host", host, *exposed, *ports, "--model", str(MODEL_DIR), "--node-id", "six")
    with machine.popen(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not serves(f"[::1]:{grpc_port}") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        served = serves(f"[::1]:{grpc_port}")
        process.terminate()
        process.wait(60)
    assert served
    ends_in(f"IPv6: `--host {host}`", "ryzanstein worker", "it serves on `[::1]`")


@pytest.mark.parametrize("offset_s", [-3600, 3600], ids=["behind", "ahead"])
def test_a_clock_that_is_wrong_by_an_hour(machine: Machine, tmp_path: Path, ends_in: EndsIn, offset_s: int) -> None:
    """One node's clock; the others' are right."""
    clocks = Clocks(tmp_path / "clocks")
    variables = [f"{name}={value}" for name, value in clocks.environment("node-0").items()]
    clocks.turn("node-0", offset_s)
    host = Host(prefix=(shutil.which("env") or "/usr/bin/env", *variables))
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, hosts={"node-0": host})) as cluster:
        body = json.dumps({"messages": [{"role": "user", "content": "Count from 1 to 9."}], "temperature": 0}).encode()
        asked = urllib.request.Request(f"{cluster.http_url}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60) as answer:
            assert COUNTED in answer.read().decode()
    ends_in(f"a node's clock an hour {'behind' if offset_s < 0 else 'ahead'}", "a cluster of one node", "an answer")


def test_an_interrupt_that_a_shell_ignores(machine: Machine, ends_in: EndsIn) -> None:
    """As in a script's background job; it ends by SIGTERM."""
    assert COUNTED in answer_of(replace(machine, prefix=("sh", "-c", 'trap "" INT && exec "$@"', "sh")))
    ends_in("a background job, in which SIGINT is ignored", UP, "an answer; SIGTERM ends it")
