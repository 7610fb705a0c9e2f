"""nginx, haproxy and envoy in front of one gRPC node: how to configure, check and start them.

Each has one worker, no access log, and room for all streams; otherwise what their manuals give for
gRPC.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ryzanstein import errors

_MAX_STREAMS = 4096
_MAX_CONNECTIONS = 8192
_LONGEST_S = 600
_MEGABYTE = 2**20
_PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@dataclass(frozen=True, slots=True)
class BenchProxy:
    """How to run one proxy. `write` returns its configuration from (port, node's port, folder)."""

    program: str
    file_name: str
    write: Callable[[int, int, Path], str]
    start: tuple[str, ...]
    check: tuple[str, ...]

    def command(self, arguments: tuple[str, ...], port: int, node_port: int, folder: Path) -> list[str]:
        """Writes the configuration into the folder and returns the command line.

        Raises UNAVAILABLE if the proxy is not installed.
        """
        path = folder / self.file_name
        path.write_text(self.write(port, node_port, folder))
        program = shutil.which(self.program, path=_PATH)
        if program is None:
            raise errors.unavailable("NOT_INSTALLED", f"{self.program} is not installed")
        return [program, *(argument.format(path=path, folder=folder) for argument in arguments)]


def _user() -> str:
    """Returns nginx's directive for the user of its workers, which is ours: only root may choose one."""
    return "user root;" if os.geteuid() == 0 else ""


def _nginx(port: int, node_port: int, folder: Path) -> str:
    return f"""
{_user()}
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
worker_rlimit_nofile {2 * _MAX_CONNECTIONS};
events {{ worker_connections {_MAX_CONNECTIONS}; }}
http {{
    access_log off;
    client_body_temp_path {folder};
    proxy_temp_path {folder};
    fastcgi_temp_path {folder};
    uwsgi_temp_path {folder};
    scgi_temp_path {folder};
    keepalive_requests 10000000;
    http2_max_concurrent_streams {_MAX_STREAMS};
    upstream node {{
        server 127.0.0.1:{node_port};
        keepalive 1024;
        keepalive_requests 10000000;
    }}
    server {{
        listen 127.0.0.1:{port} http2;
        location / {{
            grpc_pass grpc://node;
            grpc_read_timeout {_LONGEST_S}s;
            grpc_send_timeout {_LONGEST_S}s;
        }}
    }}
}}
"""


def _haproxy(port: int, node_port: int, folder: Path) -> str:
    return f"""
global
    maxconn {_MAX_CONNECTIONS}
    nbthread 1
    tune.h2.max-concurrent-streams {_MAX_STREAMS}
    tune.h2.initial-window-size {_MEGABYTE}
defaults
    mode http
    timeout connect 5s
    timeout client {_LONGEST_S}s
    timeout server {_LONGEST_S}s
    option http-no-delay
frontend clients
    bind 127.0.0.1:{port} proto h2
    default_backend nodes
backend nodes
    http-reuse always
    server node 127.0.0.1:{node_port} proto h2
"""


def _envoy(port: int, node_port: int, folder: Path) -> str:
    http2 = {"max_concurrent_streams": _MAX_STREAMS, "initial_stream_window_size": _MEGABYTE}
    limits = {
        "max_connections": _MAX_CONNECTIONS,
        "max_pending_requests": _MAX_CONNECTIONS,
        "max_requests": _MAX_CONNECTIONS,
    }
    extensions = "type.googleapis.com/envoy.extensions"
    manager = {
        "@type": f"{extensions}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "codec_type": "HTTP2",
        "http2_protocol_options": http2,
        "stream_idle_timeout": f"{_LONGEST_S}s",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{extensions}.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "node", "timeout": "0s"}}],
                }
            ]
        },
    }
    node = {
        "name": "node",
        "type": "STATIC",
        "connect_timeout": "5s",
        "circuit_breakers": {"thresholds": [limits]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{extensions}.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": http2},
            }
        },
        "load_assignment": {
            "cluster_name": "node",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _socket_address(node_port)}}]}],
        },
    }
    listener = {
        "address": _socket_address(port),
        "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}],
    }
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [node]}}, indent=2)


def _socket_address(port: int) -> Mapping[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


PROXIES: Mapping[str, BenchProxy] = MappingProxyType(
    {
        "nginx": BenchProxy(
            "nginx",
            "nginx.conf",
            _nginx,
            ("-e", "{folder}/error.log", "-p", "{folder}", "-c", "{path}"),
            ("-t", "-e", "{folder}/error.log", "-p", "{folder}", "-c", "{path}"),
        ),
        "haproxy": BenchProxy("haproxy", "haproxy.cfg", _haproxy, ("-db", "-f", "{path}"), ("-c", "-f", "{path}")),
        "envoy": BenchProxy(
            "envoy",
            "envoy.yaml",
            _envoy,
            ("-c", "{path}", "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"),
            ("-c", "{path}", "--mode", "validate", "--log-level", "error"),
        ),
    }
)
