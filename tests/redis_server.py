"""A real redis-server for tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False)
class RedisServer:
    """A real redis-server on a port of its own, that writes every change to its folder."""

    program: str
    folder: Path
    port: int
    password: str
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0" if self.password else f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        settings = {"port": self.port, "bind": "127.0.0.1", "dir": self.folder, "appendonly": "yes", "appendfsync": "always"}
        if self.password:
            settings["requirepass"] = self.password
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self.process = await asyncio.create_subprocess_exec(self.program, *flags, stdout=asyncio.subprocess.DEVNULL)
        async with asyncio.timeout(20):
            while not await self._answers():  # noqa: ASYNC110 - it tells nobody when it is ready
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.write(b"PING\r\n")
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return answer.startswith((b"+PONG", b"-NOAUTH"))

    async def kill(self) -> None:
        """SIGKILL; `start` brings it back with what it had stored."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def redis_servers(program: str, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[RedisServer]]]:
    """Yields what starts a server; all are gone at the end."""
    servers: list[RedisServer] = []

    async def start(password: str = "") -> RedisServer:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder = tmp_path / f"redis-{port}"
        folder.mkdir()
        server = RedisServer(program, folder, port, password)
        servers.append(server)
        await server.start()
        return server

    try:
        yield start
    finally:
        for server in servers:
            await server.kill()
