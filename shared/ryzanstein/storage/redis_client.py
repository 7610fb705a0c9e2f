"""A client of one Redis server, with a bound on every wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

TIMEOUT_S = 1.0
_MAX_CONNECTIONS = 32
_HEALTH_CHECK_S = 30


def redis_client(url: str, *, decode_responses: bool = True) -> Redis:
    """Returns a client that connects on use.

    A connection that died while idle (the server was restarted) is replaced and the command sent
    again, so every command that writes must be safe to repeat.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MAX_CONNECTIONS,
        timeout=TIMEOUT_S,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=_HEALTH_CHECK_S,
        retry=Retry(NoBackoff(), 1),
        decode_responses=decode_responses,
    )
    return Redis.from_pool(pool)


@contextlib.contextmanager
def redis_failures() -> Iterator[None]:
    """Raises any failure between this process and the server as a ConnectionError.

    Its message names the cause.
    """
    try:
        yield
    except (TimeoutError, RedisError, OSError) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
