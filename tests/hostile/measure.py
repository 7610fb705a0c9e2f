"""`python -m tests.hostile.measure`: what each hostile input does to a router, as a Markdown table.

A corpus is a function that takes a running router and gives rows; a new one joins `CORPORA`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.hostile.corpus import BODIES, HostileBody
from tests.hostile.socket_corpus import SOCKETS, HostileSocket, attack
from tests.hostile.victim import Lag, Victim, victim

_TRIES = 3


@dataclass(frozen=True)
class Row:
    """`lags`: the loop's worst in each try."""

    name: str
    num_bytes: int
    answer: str
    lags: tuple[Lag, ...]

    def __str__(self) -> str:
        late_ms, busy_ms = (1000 * statistics.median(column) for column in zip(*self.lags, strict=True))
        return f"| {self.name} | {_size(self.num_bytes)} | {self.answer} | {busy_ms:.0f} ms | {late_ms:.0f} ms |"


def http_rows(router: Victim) -> Iterator[Row]:
    for body in BODIES:
        yield http_row(router, body)


def http_row(router: Victim, body: HostileBody, tries: int = _TRIES) -> Row:
    """Posts it and lets the loop come to rest."""
    lags = []
    for _ in range(tries):
        router.lag()
        reply = router.post(body.path, body.content)
        time.sleep(0.05)
        lags.append(router.lag())
    param = "" if reply.status_code == 200 else reply.json()["error"]["param"] or "no JSON"
    return Row(body.name, len(body.content), f"{reply.status_code} {param[:20]}".strip(), tuple(lags))


def socket_rows(router: Victim) -> Iterator[Row]:
    for hostile in SOCKETS:
        yield socket_row(router, hostile)


def socket_row(router: Victim, hostile: HostileSocket, tries: int = _TRIES) -> Row:
    """Sends it on a socket of its own. The answer is the close code."""
    lags = []
    for _ in range(tries):
        router.lag()
        outcome = attack(router, hostile.content)
        lags.append(router.lag())
    return Row(hostile.name, len(hostile.content), str(outcome.close_code or "open"), tuple(lags))


CORPORA: Mapping[str, Callable[[Victim], Iterator[Row]]] = {"http": http_rows, "websocket": socket_rows}


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def main() -> None:
    """Names of corpora as arguments; all without."""
    with victim() as router:
        for name in sys.argv[1:] or CORPORA:
            print("| input | size | answer | loop busy at most | loop late at most |\n|---|---|---|---|---|")
            for row in CORPORA[name](router):
                print(row, flush=True)


if __name__ == "__main__":
    main()
