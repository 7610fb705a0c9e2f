"""`ryzanstein up`: a cluster on this machine that runs until Ctrl-C and leaves nothing behind."""

from __future__ import annotations

import asyncio
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from ryzanstein.auth.keys.keys_file import KeysFileError
from ryzanstein.cli import display, options
from ryzanstein.cli.access.local_key import LocalKey
from ryzanstein.cli.access.router_trust import RouterTls
from ryzanstein.cli.node_devices import NodeDevices
from ryzanstein.cli.options import CONSOLE_PORT, LARGEST_PORT
from ryzanstein.cli.processes.cluster import OWN_RANKS, ClusterSpec, LocalCluster
from ryzanstein.cli.processes.disk_room import no_room, require_room
from ryzanstein.cli.processes.ports import InUseError, require_able, require_free
from ryzanstein.cli.processes.service_process import ServiceFailedError
from ryzanstein.cli.programs import missing, require
from ryzanstein.cli.status.status_tables import node_table
from ryzanstein.cli.up.default_tp import DEFAULT_TP, default_tp
from ryzanstein.cli.up.engines import DEFAULT_NODES, Engines, num_nodes
from ryzanstein.cli.up.kept_service import KeptService
from ryzanstein.cli.up.local_console import LocalConsole, NoConsole
from ryzanstein.cli.up.models_to_serve import models_to_serve, template_setting
from ryzanstein.cli.up.state_lock import held
from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError
from ryzanstein.files.models_home import EMBEDDED
from ryzanstein.files.private_files import private_folder
from ryzanstein.files.state_home import VARIABLES, state_home
from ryzanstein.process.allotment import usable_cores
from ryzanstein.process.gpus import Device, find_gpus
from ryzanstein.survey.look import look
from ryzanstein.survey.reach import KeyedRouter

_LOOK_EVERY_S = 1.0
_GRPC_EXAMPLE = '{"chat": {"messages": [{"role": "ROLE_USER", "content": "Count from 1 to 9."}]}}'
_HTTP_EXAMPLE = '{"messages": [{"role": "user", "content": "Count from 1 to 9."}]}'

ModelDirs = Annotated[
    list[str],
    typer.Option(
        "--model",
        metavar="[NAME=]DIR",
        show_default=EMBEDDED,  # its path is this machine's, and of any length
        help="Model directory in the Hugging Face layout, GGUF file, or name of a fetched model. Repeat it for several models "
        "on each node.",
    ),
]
Templates = Annotated[
    list[str],
    typer.Option(
        "--chat-template",
        metavar="[NAME=]FILE",
        help="File with a chat template for the first model, or for the one of this name, in place of its own. Repeatable.",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Directory of logs and databases; default: ryzanstein in XDG_STATE_HOME, or HOME/.local/state/ryzanstein.",
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: a free port.")]


def up(
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            show_default=f"{DEFAULT_NODES}, or one for each --engine",
            help="Number of nodes; each is a replica of the model.",
        ),
    ] = None,
    engines: Engines = [],  # noqa: B006 - typer copies it
    tp: Annotated[
        int | None,
        typer.Option(min=1, max=64, show_default=f"{DEFAULT_TP}, or 1 if a model does not divide", help="Ranks per node."),
    ] = None,
    models: ModelDirs = [str(MODEL_DIR)],  # noqa: B006 - typer copies it
    chat_templates: Templates = [],  # noqa: B006 - typer copies it
    routers: Annotated[int, typer.Option(min=1, max=16, help="Number of routers, on consecutive ports.")] = 1,
    threads_per_rank: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads per rank.")] = 1,
    device: Annotated[
        Device,
        typer.Option(help="auto: GPUs if there is one for each rank of all nodes, else CPUs."),
    ] = "auto",
    quantization: Annotated[Literal["none", "fp16", "int8", "auto"], typer.Option(help="Weight format, on CPUs.")] = "none",
    http_port: Port = options.HTTP_PORT,
    grpc_port: Port = options.GRPC_PORT,
    orchestrator_port: Port = options.ORCHESTRATOR_PORT,
    state_dir: StateDir = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="Ask clients for a key, and use TLS between the services; key and certificates are in the state directory.",
        ),
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(dir_okay=False, help="Certificate (PEM) for TLS to clients.")] = None,
    tls_key: Annotated[Path | None, typer.Option(dir_okay=False, help="Its private key (PEM).")] = None,
    ca: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Its CA (PEM), if it is not self-signed."),
    ] = None,
    console: Annotated[
        bool | None,
        typer.Option("--console/--no-console", help="Run the page for people, too.", show_default="with a page, unless --json"),
    ] = None,
    console_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free port.")] = CONSOLE_PORT,
    trace: Annotated[bool, typer.Option("--trace", help="Record traces, for `ryzanstein trace`.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one JSON document.")] = False,
) -> None:
    """Run a local cluster until Ctrl-C. Exit code 1: a port or the state directory is in use, or a service did not start."""
    require("up", "router", "worker" if not engines or OWN_RANKS in engines else "node", *(["tls"] if secure else []))
    served = models_to_serve(models)
    templates = template_setting(chat_templates, served)
    nodes = num_nodes(nodes, engines, len(served))
    tp = tp or default_tp([model.path for model in served])
    spec = ClusterSpec(
        model=served[0].path,
        more_models=tuple(model.path for model in served[1:]),
        model_names=tuple(model.name for model in served),
        num_nodes=nodes,
        num_routers=routers,
        tp=tp,
        threads_per_rank=threads_per_rank,
        worker_flags=("--chat-template", templates) if templates else (),
        rank_flags=("--quantization", quantization),
        engines=tuple(engines),
        grpc_port=grpc_port,
        http_port=http_port,
        orchestrator_port=orchestrator_port,
        state_dir=(directory := _state_dir(state_dir)),
        secure=secure,
        router_tls=RouterTls.given(tls_cert, tls_key, ca),
        traces=trace,
        devices=_devices(device, nodes, tp * len(models)),
    )
    ports = _fixed_ports(spec)
    try:
        require_able()
        with held(directory):
            require_room(directory, "--state-dir")
            require_free(ports)
            page = console_port if (console or (console is None and not as_json)) else None
            _serve(LocalCluster(_with_key(spec) if secure else spec), page, as_json=as_json)
    except InUseError as taken:
        display.people().print(str(taken), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except ServiceFailedError as failure:
        display.show_failure(display.people(), failure)
        if lack := no_room(directory, "--state-dir"):
            display.people().print(lack, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        display.people().print("stopped; no process is left")


def _with_key(spec: ClusterSpec) -> ClusterSpec:
    """Returns the cluster with routers that ask for a key. Raises ServiceFailedError where none can be kept."""
    assert spec.state_dir is not None
    try:
        private_folder(spec.state_dir)
        kept = LocalKey.kept(spec.state_dir)
    except (KeysFileError, OSError) as error:
        raise ServiceFailedError(f"no key can be kept: {error}") from None
    flags = (*spec.router_flags, "--keys-file", str(kept.keys_file))
    return replace(spec, router_flags=flags, api_key=kept.key, api_key_file=kept.path)


def _state_dir(chosen: Path | None) -> Path:
    """Returns the directory of state. Raises BadParameter if none is chosen and the environment names none."""
    directory = chosen or state_home()
    if directory is None:
        raise typer.BadParameter(f"is required, because the environment sets none of {VARIABLES}", param_hint="--state-dir")
    try:
        return directory.expanduser().resolve()
    except RuntimeError:
        raise typer.BadParameter(f"{directory}: there is no such home directory", param_hint="--state-dir") from None


def _devices(asked: Device, num_nodes: int, num_ranks: int) -> NodeDevices:
    """Returns the GPUs of each node. Says so if there are some that are not used, and ends if there are too few."""
    try:
        chosen = NodeDevices.chosen(asked, num_nodes, num_ranks, find_gpus())
    except RyzansteinError as error:
        display.people().print(f"--device {asked}: {error.message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if chosen.unused:
        display.people().print(chosen.unused, style="yellow", markup=False, soft_wrap=True)
    return chosen


def _fixed_ports(spec: ClusterSpec) -> dict[int, str]:
    """Returns the ports that options chose.

    Raises BadParameter if two are equal or one is out of range.
    """
    ports: dict[int, str] = {}
    asked = (("--grpc-port", spec.grpc_port, spec.num_routers), ("--http-port", spec.http_port, spec.num_routers))
    for option, first, count in (*asked, ("--orchestrator-port", spec.orchestrator_port, 1)):
        for port in range(first, first + count) if first else ():
            if port > LARGEST_PORT:
                raise typer.BadParameter(f"port {port} of router {port - first} is above {LARGEST_PORT}", param_hint=option)
            if port in ports:
                raise typer.BadParameter(f"port {port} is also used by {ports[port]}", param_hint=option)
            ports[port] = option
    return ports


def _serve(cluster: LocalCluster, console_port: int | None, *, as_json: bool) -> None:
    """Runs until KeyboardInterrupt. `console_port` None: without a console.

    Raises ServiceFailedError if a service does not start at first.
    """
    people, spec, console = display.people(), cluster.spec, None
    if (crowding := crowding_of(spec, usable_cores())) is not None:
        people.print(crowding, style="yellow", soft_wrap=True)
    with display.waiting(people, f"starting (nodes: {spec.num_nodes}, ranks of each: {spec.tp}) ...") as doing:
        cluster.start(doing)
    if cluster.kernels:
        people.print(cluster.kernels, markup=False, soft_wrap=True)
    try:
        if not as_json:
            _show_addresses(people, cluster)
        console, link = (None, "") if console_port is None else _console(people, cluster, console_port)
        if as_json:
            display.print_json({**addresses(cluster), "console": link or None})
        elif console is not None:
            _show_link(people, console, link)
        _watch(cluster, console, people)
    finally:
        try:
            if console is not None:
                console.stop()
        finally:
            cluster.stop()


def _console(people: Console, cluster: LocalCluster, port: int) -> tuple[LocalConsole | None, str]:
    """Starts the page, and returns it with its link. Where it cannot run it says why, and the cluster runs without it."""
    if lacks := missing("console"):
        people.print(f"no console: pip install 'ryzanstein[{lacks}]' has what it needs", markup=False, soft_wrap=True)
        return None, ""
    console = LocalConsole(cluster, port)
    try:
        require_free({port: "--console-port"} if port else {})
        console.start()
        return console, console.first_link()
    except (InUseError, NoConsole, OSError) as error:
        console.stop()
        why = f"no console: {error}" if isinstance(error, InUseError | OSError) else str(error)
        people.print(why, style="yellow", markup=False, soft_wrap=True)
        return None, ""
    except BaseException:
        console.stop()
        raise


def _show_link(people: Console, console: LocalConsole, link: str) -> None:
    people.print(f"The console, in a browser on this machine (another link: kill -USR1 {console.pid}):", markup=False)
    people.print(f"  {link}", markup=False, soft_wrap=True)


def crowding_of(spec: ClusterSpec, cores: float) -> str | None:
    """Returns a sentence if the ranks have more threads than there are cores for them."""
    num_nodes = spec.engines.count(OWN_RANKS) if spec.engines else spec.num_nodes
    threads = num_nodes * spec.tp * spec.threads_per_rank * (1 + len(spec.more_models))
    if threads <= cores:
        return None
    return f"{threads} threads share {cores:g} cores: it works, and is slower than fewer --nodes, --tp or --threads-per-rank"


def addresses(cluster: LocalCluster) -> dict[str, object]:
    """Returns the addresses of all services, for scripts."""
    return {
        "grpc": cluster.router_addresses,
        "http": [cluster.http_url_of(name) for name in cluster.router_names],
        "orchestrator": cluster.orchestrator_address,
        "nodes": {node_id: cluster.services[node_id].grpc_address for node_id in cluster.node_ids},
        "metrics": {name: service.metrics_url for name, service in cluster.services.items()},
        "pids": {name: service.pid for name, service in cluster.services.items()},
        "state_dir": str(cluster.state_dir),
        "ca": None if cluster.spec.router_tls is None else str(cluster.spec.router_tls.ca),
        "tls_dir": None if cluster.tls_dir is None else str(cluster.tls_dir),
        "api_key_file": None if cluster.spec.api_key_file is None else str(cluster.spec.api_key_file),
    }


def _show_addresses(people: Console, cluster: LocalCluster) -> None:
    router, http, key_file = cluster.router_address, cluster.http_url, cluster.spec.api_key_file
    bearer = "" if key_file is None else ' -H "authorization: Bearer $RYZANSTEIN_API_KEY"'
    tls = cluster.spec.router_tls
    ca = "" if tls is None else shlex.quote(str(tls.ca))
    curl, grpcurl = (f"curl --cacert {ca}", f"-cacert {ca}") if ca else ("curl", "-plaintext")
    lines = (
        f"gRPC {', '.join(cluster.router_addresses)}   HTTP {http}   logs {cluster.state_dir}",
        "",
        *([] if key_file is None else [f"  export RYZANSTEIN_API_KEY=$(cat {shlex.quote(str(key_file))})"]),
        f"  ryzanstein chat --router {router}" + (f" --ca {ca}" if ca else ""),
        f"  grpcurl {grpcurl}{bearer} -d '{_GRPC_EXAMPLE}' {router} ryzanstein.v1.InferenceService/StreamChat",
        f"  {curl} {http}/v1/chat/completions{bearer} -H 'content-type: application/json' -d '{_HTTP_EXAMPLE}'",
        *([] if cluster.tls_dir is None else [f"  export RYZANSTEIN_TLS_DIR={cluster.tls_dir}   # for status, deploy, drain"]),
        "",
        "Ctrl-C stops everything.",
    )
    for line in lines:
        people.print(line, markup=False, soft_wrap=True)


def _watch(cluster: LocalCluster, console: LocalConsole | None, people: Console) -> None:
    """Shows the nodes if there is a terminal, and restarts services that end.

    The others keep running.
    """
    kept = [KeptService(each) for each in (*cluster.services.values(), *(() if console is None else (console,)))]
    with Live(console=people, auto_refresh=False) as live:
        while True:
            cluster.keep_certificates(time.monotonic())
            for service in kept:
                for line in service.look(time.monotonic()):
                    people.print(line, style="yellow", markup=False, soft_wrap=True)
            if console is not None and (link := console.link()):  # it was started again, or asked for another one
                _show_link(people, console, link)
            if people.is_terminal:
                live.update(_nodes(cluster), refresh=True)
            time.sleep(_LOOK_EVERY_S)


def _nodes(cluster: LocalCluster) -> RenderableType:
    """Returns the table of nodes, or a message if it cannot be shown."""
    try:
        tls = cluster.spec.router_tls
        router = KeyedRouter(cluster.router_address, cluster.spec.api_key, None if tls is None else tls.trust)
        return node_table(asyncio.run(look(cluster.orchestrator_address, router, cluster.dialer)))
    except Exception as error:
        return f"cannot show the nodes: {error!r}"
