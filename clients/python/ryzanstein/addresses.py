"""Addresses as text: host:port, with brackets around a host of IPv6 (RFC 3986, section 3.2.2)."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

EVERY_HOST = ("0.0.0.0", "::")
"""A listener on one of these is reached by any address of its machine."""

_LARGEST_PORT = 65535


def bare_host(host: str) -> str:
    """Returns the host without brackets, as sockets take it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a listener on this host. Of names, only `localhost` is one of these."""
    try:
        return ip_address(bare_host(host)).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(address: str) -> str:
    """Returns the host of an address that may have no port, as in the Host of HTTP; without brackets."""
    return bare_host(address if address.endswith("]") or ":" not in address else address.rpartition(":")[0])


def join_address(host: str, port: int | str) -> str:
    """Returns host:port, or [host]:port for a host of IPv6, with or without brackets."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str, port: int) -> str:
    """Returns the address. One that is an IP address alone, as Kubernetes gives a pod its own, gets the port."""
    try:
        return join_address(str(ip_address(bare_host(address))), port)
    except ValueError:
        return address


def checked_target(address: str) -> str:
    """Returns host:port, or what else gRPC connects to. Raises ValueError for an IPv6 address that lacks brackets."""
    try:
        host = IPv6Address(address.rpartition(":")[0])
    except ValueError:
        return address
    raise ValueError(f"must have brackets around an IPv6 address, as in [{host}]:50050")


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port. Raises ValueError with a sentence for what is not host:port."""
    host, _, port = address.rpartition(":")
    bare = bare_host(host)
    if not (bare and bare.isascii() and port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= _LARGEST_PORT):
        raise ValueError(f"must be host:port with a port from 1 to {_LARGEST_PORT}, got {address[:80]!a}")
    if ":" in host and bare == host:
        raise ValueError(f"must have brackets around an IPv6 address, as in [::1]:{port}, got {address[:80]!a}")
    return bare, int(port)
