"""Hosts of a laboratory as network namespaces.

Each has one veth pair into a bridge, which has a separate namespace.

This machine's own namespace gets one veth end and the route to the laboratory, nothing else. Names
and addresses contain the process id, so that two laboratories do not collide. What a killed one
left behind is removed by the next. It needs the right to make namespaces (root).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from ryzanstein.cli.processes.host import Host

_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_PREFIX = "ryz"
_TABLE = "inet chaos"
_FIRST_HOST = 10
_INSECURE = "RYZANSTEIN_INSECURE"
_LAST_HOST = 250
_COMMAND_S = 10.0


class NetworkImpossibleError(Exception):
    """This machine does not let us make network namespaces, or a program for them is missing."""


def program(name: str) -> str:
    """Returns the absolute path of a program, also of /usr/sbin.

    Raises NetworkImpossibleError if it is not installed.
    """
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise NetworkImpossibleError(f"{name} is not installed (make parts)")
    return found


class HostNetwork:
    """The network, open while in `with`.

    At the end, everything is removed, also after a failure.
    """

    def __init__(self) -> None:
        self._ip, self._nft = program("ip"), program("nft")
        self._env = program("env")
        number = os.getpid() % 2**14
        self._net = f"10.{192 + (number >> 8)}.{number & 255}"
        self._name = f"{_PREFIX}{os.getpid()}"
        self._bridge = f"{self._name}-bridge"
        self._indices = count(_FIRST_HOST)
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        _remove_leftovers(self._ip)
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def add(self, name: str, **environment: str) -> Host:
        """Adds a host with its own address; processes on it get `environment` besides ours."""
        index = next(self._indices)
        if index > _LAST_HOST:
            raise NetworkImpossibleError(f"a laboratory has at most {_LAST_HOST - _FIRST_HOST + 1} hosts")
        namespace, address = self.namespace(name), f"{self._net}.{index}"
        self._run("netns", "add", namespace)
        # Only the laboratory's hosts reach each other.
        variables = tuple(f"{key}={value}" for key, value in {_INSECURE: "true", **environment}.items())
        host = Host(address, (self._ip, "netns", "exec", namespace, self._env, *variables))
        self.hosts[name] = host
        self._run("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", f"p{index}", "netns", self._bridge)
        self._run("-n", self._bridge, "link", "set", f"p{index}", "master", "br0", "up")
        self._run("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        self._run("-n", namespace, "link", "set", "eth0", "up")
        self._run("-n", namespace, "link", "set", "lo", "up")
        return host

    def remove(self, name: str) -> None:
        """Removes a host whose processes have ended."""
        self._forget(self.namespace(name))
        del self.hosts[name]

    def namespace(self, name: str) -> str:
        return f"{self._name}-{name}"

    @asynccontextmanager
    async def rules(
        self,
        name: str,
        inbound: Sequence[str] = (),
        outbound: Sequence[str] = (),
        *,
        now: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[None]:
        """Applies nftables rules on a host while in the context, for incoming and outgoing packets.

        One set per host.

        `now` is called just before they take effect, because starting nft takes longer than a fault
        should.
        """
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; {'; '.join(rules)}; }}\n"
            for hook, rules in (("input", inbound), ("output", outbound))
            if rules
        )
        await self._nftables(name, f"table {_TABLE} {{\n{chains}}}\n", now)
        try:
            yield
        finally:
            await self._nftables(name, f"delete table {_TABLE}\n")

    async def _nftables(self, name: str, text: str, now: Callable[[], None] = lambda: None) -> None:
        command = (self._ip, "netns", "exec", self.namespace(name), self._nft, "-f", "-")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        now()
        _, message = await process.communicate(text.encode())
        if process.returncode != 0:
            raise OSError(f"nft refused {text!r}: {message.decode(errors='replace').strip()}")

    def _open(self) -> None:
        self._run("netns", "add", self._bridge)
        self._run("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        self._run("-n", self._bridge, "link", "set", "br0", "up")
        self._run("link", "add", self._name, "type", "veth", "peer", "name", "p1", "netns", self._bridge)
        self._run("-n", self._bridge, "link", "set", "p1", "master", "br0", "up")
        self._run("addr", "add", f"{self._net}.1/24", "dev", self._name)
        self._run("link", "set", self._name, "up")

    def _close(self) -> None:
        for name in [*map(self.namespace, self.hosts), self._bridge]:
            self._forget(name)
        # Our end goes with the bridge's, a moment later: the kernel removes namespaces in the
        # background.
        subprocess.run((self._ip, "link", "delete", self._name), check=False, capture_output=True, timeout=_COMMAND_S)
        self.hosts.clear()

    def _forget(self, namespace: str) -> None:
        subprocess.run((self._ip, "netns", "delete", namespace), check=False, capture_output=True, timeout=_COMMAND_S)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run((self._ip, *arguments), check=False, capture_output=True, text=True, timeout=_COMMAND_S)
        if done.returncode != 0:
            raise NetworkImpossibleError(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")


def _remove_leftovers(ip: str) -> None:
    """Removes namespaces of laboratories whose process is gone."""
    listed = subprocess.run((ip, "netns", "list"), check=False, capture_output=True, text=True, timeout=_COMMAND_S).stdout
    for name in re.findall(rf"^{_PREFIX}\d+-\S+", listed, re.MULTILINE):
        pid = name.removeprefix(_PREFIX).split("-", 1)[0]
        if not Path(f"/proc/{pid}").exists():
            subprocess.run((ip, "netns", "delete", name), check=False, capture_output=True, timeout=_COMMAND_S)
