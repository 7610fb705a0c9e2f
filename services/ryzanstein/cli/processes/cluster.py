"""A cluster on this machine: an orchestrator, nodes and routers as child processes.

The processes never outlive this one.

`ryzanstein up`, `ryzanstein demo` and the tests use it. Plain blocking calls; nothing here knows
asyncio or models.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from ryzanstein.addresses import join_address
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.access.router_trust import RouterDialer, RouterTls
from ryzanstein.cli.kernels import have_kernels
from ryzanstein.cli.node_devices import NodeDevices
from ryzanstein.cli.processes.host import LOCAL, Host
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import Flags, ServiceFailedError, ServiceProcess
from ryzanstein.cli.processes.start_watch import STILL_S, StartWatch
from ryzanstein.cli.processes.temporary_state import TemporaryState, uninterrupted
from ryzanstein.files.model_paths import model_name
from ryzanstein.files.named_paths import write_setting
from ryzanstein.files.private_files import private_folder
from ryzanstein.process.allotment import memory_bytes
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from ryzanstein.cli.access.certificates import LocalCertificates

ORCHESTRATOR = "orchestrator"
TRACES = "traces"
OWN_RANKS = "own"
_START_ATTEMPTS = 3
_LOG_BYTES, _LOG_FILES = 32 * 2**20, 4
_POLL_S = 0.05
_MEMORY_SHARE = 0.9  # of what this process may use, for the models of all nodes
_PORT_TAKEN = ("cannot listen on", "Address already in use")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start.

    Port 0 means a free one; `state_dir` None means a temporary one, removed with the cluster.

    The `*_flags` are passed unchanged to each service of that kind, after our own. `hosts` and
    `settings` are by service name: `hosts` says where a service runs, if not on 127.0.0.1, and
    `settings` replaces settings that we chose. `model_names` are the names of `model` and `more_models`;
    empty: those of the directories. `devices` says which GPUs each node gets: none by
    default. `engines` is what computes on each node: `OWN_RANKS`, or the URL of a server; empty: ranks on all of them.
    Ranks beside servers are in reserve. `rank_flags` are for nodes with ranks. A start is given up when nothing has
    moved for `still_s`. `secure`: services talk to each
    other with TLS alone, with certificates in `state_dir`. `api_key` asks the routers for their nodes
    where they have keys; it is passed to no process. `api_key_file` has it for clients. `traces`: routers and nodes
    record all traces in `state_dir`, for `ryzanstein trace`.
    """

    model: Path
    num_nodes: int = 2
    num_routers: int = 1
    tp: int = 2
    threads_per_rank: int = 1
    grpc_port: int = 0
    http_port: int = 0
    orchestrator_port: int = 0
    state_dir: Path | None = None
    worker_flags: tuple[str, ...] = ()
    rank_flags: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    orchestrator_flags: tuple[str, ...] = ()
    hosts: Mapping[str, Host] = field(default_factory=dict)
    settings: Mapping[str, Flags] = field(default_factory=dict)
    more_models: tuple[Path, ...] = ()
    still_s: float = STILL_S
    stop_grace_s: float = 10.0
    model_names: tuple[str, ...] = ()
    secure: bool = False
    devices: NodeDevices = field(default_factory=NodeDevices)
    api_key: str = field(default="", repr=False)
    api_key_file: Path | None = None
    router_tls: RouterTls | None = None
    traces: bool = False


class LocalCluster:
    """A cluster that starts on `start` or `with` and ends on `stop`.

    Services are named orchestrator, node-0, node-1, ..., router-0, ... `services` holds them in
    start order. They live only as long as the thread that called `start`.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.services: dict[str, ServiceProcess] = {}
        self._http_ports: dict[str, int] = {}
        self.kernels = ""  # after `start`: what the user should know of the kernels
        self._temporary: TemporaryState | None = None
        self._certificates: LocalCertificates | None = None

    @property
    def node_ids(self) -> list[str]:
        return [f"node-{i}" for i in range(self.spec.num_nodes)]

    @property
    def router_names(self) -> list[str]:
        return [f"router-{i}" for i in range(self.spec.num_routers)]

    @property
    def router_address(self) -> str:
        """Returns host:port of the first router's gRPC face."""
        return self.services[self.router_names[0]].grpc_address

    @property
    def router_addresses(self) -> list[str]:
        return [self.services[name].grpc_address for name in self.router_names]

    @property
    def http_url(self) -> str:
        """Returns the URL of the first router's HTTP face, without a path."""
        return self.http_url_of(self.router_names[0])

    def http_url_of(self, router_name: str) -> str:
        scheme = "http" if self.spec.router_tls is None else "https"
        return f"{scheme}://{join_address(self._host(router_name).address, self._http_ports[router_name])}"

    @property
    def orchestrator_address(self) -> str:
        return self.services[ORCHESTRATOR].grpc_address

    @property
    def state_dir(self) -> Path:
        """Returns the directory of logs and databases."""
        if self.spec.state_dir is not None:
            private_folder(self.spec.state_dir)
            return self.spec.state_dir
        if self._temporary is None:
            self._temporary = TemporaryState()
        return self._temporary.path

    @property
    def dialer(self) -> Dialer:
        """Returns how the operator dials the orchestrator and nodes, after `start`."""
        return PLAIN if self._certificates is None else self._certificates.dialer()

    @property
    def tls_dir(self) -> Path | None:
        """Returns the directory of the operator's certificate; None without TLS."""
        return None if self._certificates is None else self._certificates.operator

    def keep_certificates(self, now: float) -> None:
        """Renews certificates before they expire. Call it now and then, with monotonic seconds."""
        if self._certificates is not None:
            self._certificates.keep(now)

    def start(self, doing: Callable[[str], None] = lambda _: None) -> None:
        """Starts all services and returns when each router sees every node ready.

        `doing` receives lines that say what the start waits for. There is no time limit while something
        makes progress, see `StartWatch`. Kernels that are not in the cache are compiled first.
        After ServiceFailedError nothing is left behind. If a port that we chose is taken before it
        is bound, another is chosen, a few times.
        """
        needless = self.spec.devices.device == "cuda" or (self.spec.engines and OWN_RANKS not in self.spec.engines)
        self.kernels = "" if needless else have_kernels(doing)
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._start_once(doing)
                return
            except ServiceFailedError as failure:
                self.stop()
                if attempt == _START_ATTEMPTS or not self._may_choose_again(failure):
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Stops routers, nodes and the orchestrator, in this order.

        Sends SIGTERM, then SIGKILL to what outlives the grace. KeyboardInterrupt ends the grace, and is
        raised when nothing is left.
        """
        try:
            for names in (self.router_names, self.node_ids, [ORCHESTRATOR]):
                self._stop_together([self.services[name] for name in names if name in self.services])
        finally:
            with uninterrupted():
                self._leave_nothing()

    def _leave_nothing(self) -> None:
        for service in self.services.values():
            service.kill()
        self.services.clear()
        if self._temporary is not None:
            self._temporary.remove()
            self._temporary = None

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one service's own process: SIGKILL, SIGSTOP, SIGCONT. Does not wait."""
        self.services[name].signal(number)

    def restart(self, name: str) -> None:
        """Restarts a service on the same ports and returns when it is ready.

        Kills it if it still runs.
        """
        service = self.services[name]
        service.kill()
        service.start()
        StartWatch([service], self.spec.still_s).wait(lambda: [] if service.serves() else [name])

    def wait_nodes(self, count: int, timeout_s: float = 90.0) -> None:
        """Returns when every router sees exactly `count` ready nodes."""
        deadline = time.monotonic() + timeout_s
        for name in self.router_names:
            while (seen := self._ready_nodes(self.services[name].grpc_address)) != count:
                if time.monotonic() > deadline:
                    tail = self.services[name].log_tail()
                    raise ServiceFailedError(f"{name} sees {seen} ready nodes instead of {count}\n{tail}")
                time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _may_choose_again(self, failure: ServiceFailedError) -> bool:
        """Returns whether other ports could help: one was taken, and we chose all of them."""
        chosen = not (self.spec.grpc_port or self.spec.http_port or self.spec.orchestrator_port)
        return chosen and any(sign in str(failure) for sign in _PORT_TAKEN)

    def _start_once(self, doing: Callable[[str], None]) -> None:
        self._describe()
        for service in self.services.values():
            service.start()
        services = list(self.services.values())
        watch = StartWatch(services, self.spec.still_s)
        watch.wait(lambda: [service.name for service in services if not service.serves()], doing)
        watch.wait(lambda: [] if self._see_all_nodes() else self.node_ids, doing)

    def _see_all_nodes(self) -> bool:
        """Returns whether every router sees every node ready with all its models."""
        return all(self._ready_nodes(address) == self.spec.num_nodes for address in self.router_addresses)

    def _ready_nodes(self, router_address: str) -> int:
        """Returns how many nodes a router can send requests to, of the model that has the fewest.

        0 if the router does not answer or does not know of all models.
        """
        credential = (("authorization", f"Bearer {self.spec.api_key}"),) if self.spec.api_key else ()
        with self._router_dialer.open_blocking(router_address, Peer(PeerRole.ROUTER)) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            try:
                models = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=2, metadata=credential)
            except grpc.RpcError:
                return 0
        ready = sorted((each.ready_nodes for each in models.models if not each.parent), reverse=True)
        num_models = 1 + len(self.spec.more_models)
        return ready[num_models - 1] if len(ready) >= num_models else 0

    @property
    def _names(self) -> list[str]:
        return list(self.spec.model_names) or [model_name(path) for path in (self.spec.model, *self.spec.more_models)]

    def _describe(self) -> None:
        """Chooses the ports and describes the processes; nothing runs yet."""
        spec = self.spec
        self._certificates = None if not spec.secure else self._made_certificates()
        ports = iter(free_ports(2 + 2 * spec.num_nodes + 3 * spec.num_routers))
        orchestrator_port = spec.orchestrator_port or next(ports)
        self._describe_orchestrator(orchestrator_port, ports)
        for index, node_id in enumerate(self.node_ids):
            self._describe_node(index, node_id, orchestrator_port, ports)
        for index, name in enumerate(self.router_names):
            self._describe_router(index, name, orchestrator_port, ports)

    def _describe_orchestrator(self, port: int, ports: Iterator[int]) -> None:
        flags: Flags = {
            "grpc_port": port,
            "metrics_port": next(ports),
            "database": str(self.state_dir / "orchestrator.sqlite"),
        }
        self._add(ORCHESTRATOR, "orchestrator", flags, self.spec.orchestrator_flags)

    def _describe_node(self, index: int, node_id: str, orchestrator_port: int, ports: Iterator[int]) -> None:
        devices = self.spec.devices
        flags: dict[str, str | int | float] = {
            "node_id": node_id,
            "grpc_port": next(ports),
            "metrics_port": next(ports),
            "orchestrator": join_address(self._host(ORCHESTRATOR).address, orchestrator_port),
            "model": str(self.spec.model),
            "model_name": self._names[0],
            "more_models": write_setting(list(zip(self._names[1:], self.spec.more_models, strict=True))),
            "model_memory_bytes": 0 if devices.names else int(_MEMORY_SHARE * memory_bytes()) // len(self.node_ids),
            "drain_grace_s": self.spec.stop_grace_s / 2,
        }
        if (engine := self.spec.engines[index] if self.spec.engines else OWN_RANKS) != OWN_RANKS:
            self._add(node_id, "worker", {**flags, "engine": engine}, self.spec.worker_flags)
            return
        if self.spec.engines:
            flags["engine"] = OWN_RANKS  # whatever the environment says
        flags |= {"device": devices.device, "tp": self.spec.tp, "threads_per_rank": self.spec.threads_per_rank}
        reserve = ("--reserve",) if set(self.spec.engines) - {OWN_RANKS} else ()
        self._add(node_id, "worker", flags, (*self.spec.worker_flags, *self.spec.rank_flags, *reserve), devices.prefix(index))

    def _describe_router(self, index: int, name: str, orchestrator_port: int, ports: Iterator[int]) -> None:
        """Describes a router; each further one listens on the next ports if ports are given."""
        spec = self.spec
        self._http_ports[name] = (spec.http_port + index) if spec.http_port else next(ports)
        flags: Flags = {
            "router_id": name,
            "grpc_port": (spec.grpc_port + index) if spec.grpc_port else next(ports),
            "http_port": self._http_ports[name],
            "metrics_port": next(ports),
            "orchestrator": join_address(self._host(ORCHESTRATOR).address, orchestrator_port),
            "state_dir": str(self.state_dir / name),
            # Shared by all, so that any of them can continue a session, or a generation whose
            # router is gone.
            "session_dir": str(self.state_dir),
            "drain_grace_s": spec.stop_grace_s / 2,
        }
        self._add(name, "router", flags, spec.router_flags)

    def _add(self, name: str, service: str, flags: Flags, extra_flags: tuple[str, ...], prefix: tuple[str, ...] = ()) -> None:
        log_path, host = self.state_dir / f"{name}.log", self._host(name)
        host = replace(host, prefix=(*host.prefix, *prefix))
        dialer = PLAIN if self._certificates is None else self._certificates.dialer()
        if service == "router":
            # What is public of a router has no certificate of ours.
            dialer, extra_flags = (
                self._router_dialer,
                (*extra_flags, *(self.spec.router_tls.flags if self.spec.router_tls else ())),
            )
        flags = {**flags, **self._tls_flags(name, service, flags)}
        if self.spec.traces and service != "orchestrator":
            flags = {**flags, "trace_dir": str(self.state_dir / TRACES)}
        flags = {**flags, "log_file_bytes": _LOG_BYTES, "log_files": _LOG_FILES, **self.spec.settings.get(name, {})}
        self.services[name] = ServiceProcess(name, service, flags, extra_flags, log_path, host=host, dialer=dialer)

    @property
    def _router_dialer(self) -> Dialer:
        return PLAIN if self.spec.router_tls is None else RouterDialer(self.spec.router_tls.trust)

    def _made_certificates(self) -> LocalCertificates:
        from ryzanstein.cli.access.certificates import LocalCertificates

        return LocalCertificates(self.state_dir / "tls")

    def _tls_flags(self, name: str, service: str, flags: Flags) -> Flags:
        """Returns the settings of TLS. It is the only port of an orchestrator or node, so it has the number of that."""
        if self._certificates is None:
            return {}
        role = {"worker": PeerRole.NODE, "router": PeerRole.ROUTER}.get(service)
        peer = Peer(PeerRole.ORCHESTRATOR) if role is None else Peer(role, name)
        port = 0 if service == "router" else flags["grpc_port"]
        return {"tls": "require", "tls_dir": str(self._certificates.folder(name, peer)), "tls_port": port}

    def _host(self, name: str) -> Host:
        return self.spec.hosts.get(name, LOCAL)

    def _stop_together(self, services: list[ServiceProcess]) -> None:
        deadline = time.monotonic() + self.spec.stop_grace_s
        for service in services:
            service.signal(signal.SIGTERM)
            service.signal(signal.SIGCONT)  # a stopped process would never see SIGTERM
        for service in services:
            service.wait_ended(max(0.0, deadline - time.monotonic()))
            service.kill()
