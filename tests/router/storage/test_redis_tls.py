"""Redis over TLS with a CA of its own, which the URL names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis.exceptions
from tests.public_certificates import PublicAuthority

from ryzanstein.auth.keys.redis_keys import KeysRedisError, RedisKeys
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.storage.redis_client import redis_client
from ryzanstein.storage.redis_url import checked_redis_url


@contextlib.asynccontextmanager
async def redis_with_tls(program: str, folder: Path, authority: PublicAuthority) -> AsyncIterator[str]:
    """Yields a URL without its CA."""
    files, port = authority.write(folder), next(iter(free_ports(1)))
    flags = (
        "--port",
        "0",
        "--tls-port",
        str(port),
        "--tls-cert-file",
        str(files.certificate),
        "--tls-key-file",
        str(files.key),
    )
    flags += ("--tls-ca-cert-file", str(files.ca), "--tls-auth-clients", "no", "--save", "", "--dir", str(folder))
    process = await asyncio.create_subprocess_exec(program, *flags, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.05)
        yield f"rediss://127.0.0.1:{port}/0"
    finally:
        process.kill()
        await process.wait()


async def test_the_url_names_the_ca(part: Callable[[str], str], tmp_path: Path) -> None:
    authority = PublicAuthority()
    async with redis_with_tls(part("redis-server"), tmp_path, authority) as url:
        for ca, trusted in ((tmp_path / "ca.pem", True), (PublicAuthority().write(tmp_path / "other").ca, False)):
            full = checked_redis_url(f"{url}?ssl_ca_certs={ca}")
            client, keys = redis_client(full), RedisKeys(full, "test:")
            if trusted:
                assert await client.ping()
                assert await asyncio.to_thread(keys.version) == ""
            else:
                with pytest.raises(redis.exceptions.ConnectionError, match="certificate verify failed"):
                    await client.ping()
                with pytest.raises(KeysRedisError):
                    await asyncio.to_thread(keys.version)
            await client.aclose()
            await asyncio.to_thread(keys.close)
