"""Who may use the page, and from where it may be asked.

On this machine a link with a token logs in, once. Elsewhere each person enters an API key of the cluster, which stays in
memory: it is in no cookie, no page, no log and no error. Requests under a foreign name (DNS rebinding) or from a foreign page
are refused.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from urllib.parse import urlsplit

from ryzanstein.addresses import join_address
from ryzanstein.client import AsyncClient, Tls
from ryzanstein.console.answers.hub import Hub
from ryzanstein.console.answers.restarts import LoginNote, RestartNotes
from ryzanstein.console.cluster import ClusterWatch
from ryzanstein.console.telemetry import ConsoleTelemetry

TOKEN_S = 600.0
MOST_TOKENS = 16
MOST_PEOPLE = 64
MOST_LOGINS = 256
_DEFAULT_PORTS = {"http": "80", "https": "443"}

Clock = Callable[[], float]


@dataclass(slots=True)
class Person:
    """Somebody with a key. Nobody else sees their answers."""

    hub: Hub
    watch: ClusterWatch
    leave: list[Callable[[], None]] = field(default_factory=list)
    """Called when a login of the person is over: closes the tabs that were opened through it."""


@dataclass(slots=True)
class _Login:
    person: str
    used_at: float


class NoRoomForPeople(Exception):
    """As many people are logged in as the console takes."""


class Logins:
    """Tokens of links, cookies, and the people behind them. All are kept as digests."""

    def __init__(
        self, idle_s: float, telemetry: ConsoleTelemetry, clock: Clock = time.monotonic, notes: RestartNotes | None = None
    ) -> None:
        """`notes` keep logins over a restart, for a console whose people need no key of their own."""
        self._idle_s, self._telemetry, self._clock = idle_s, telemetry, clock
        self._notes = notes or RestartNotes(None)
        self._tokens: dict[str, float] = {}
        self._logins: dict[str, _Login] = {}
        self._people: dict[str, Person] = {}

    def restore(self, person: Person) -> None:
        """Lets in again who was logged in before a restart. `person` is who has the key of the process."""
        name, now = person_of(""), self._clock()
        self._people[name] = person
        for digest, note in self._notes.logins().items():
            idle_s = max(0.0, time.time() - note.used_at)
            if note.person == name and idle_s < self._idle_s and len(self._logins) < MOST_LOGINS:
                self._logins[digest] = _Login(name, now - idle_s)
        person.hub.resume()

    def write(self) -> None:
        """Keeps the logins for a restart."""
        now, unix = self._clock(), time.time()
        notes = {digest: LoginNote(each.person, unix - (now - each.used_at)) for digest, each in self._logins.items()}
        self._notes.write_logins(notes)

    def new_token(self) -> str:
        """Returns the token of a link, which logs in once."""
        now = self._clock()
        self._tokens = {digest: until for digest, until in self._tokens.items() if until > now}
        while len(self._tokens) >= MOST_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        token = secrets.token_urlsafe(32)
        self._tokens[_digest(token)] = now + TOKEN_S
        return token

    def take_token(self, token: str) -> bool:
        """Returns whether the token logs in. It does so once."""
        return self._tokens.pop(_digest(token), 0.0) > self._clock()

    def enter(self, key: str, make: Callable[[], Person]) -> str:
        """Returns a cookie for who has this key; empty: the key of the process. Raises NoRoomForPeople."""
        name = person_of(key)
        if name not in self._people:
            if len(self._people) >= MOST_PEOPLE:
                raise NoRoomForPeople
            self._people[name] = make()
            self._people[name].hub.resume()
        while len(self._logins) >= MOST_LOGINS:
            del self._logins[min(self._logins, key=lambda each: self._logins[each].used_at)]
        cookie = secrets.token_urlsafe(32)
        self._logins[_digest(cookie)] = _Login(name, self._clock())
        self._telemetry.people.set(len(self._people))
        self.write()
        return cookie

    def person(self, cookie: str | None) -> Person | None:
        """Returns who has this cookie, and notes that they do something."""
        login = self._logins.get(_digest(cookie)) if cookie else None
        if login is None:
            return None
        now = self._clock()
        if now - login.used_at > self._idle_s:
            return None
        login.used_at = now
        return self._people[login.person]

    def leave(self, cookie: str | None) -> None:
        """Forgets a cookie."""
        if cookie:
            self._logins.pop(_digest(cookie), None)
            self.write()

    def idle(self) -> list[Person]:
        """Forgets logins that nobody uses, and returns the people who have none left; their answers are to be ended."""
        oldest = self._clock() - self._idle_s
        self._logins = {digest: login for digest, login in self._logins.items() if login.used_at > oldest}
        present = {login.person for login in self._logins.values()}
        gone = [name for name, person in self._people.items() if name not in present and not person.hub.running]
        left = [self._people.pop(name) for name in gone]
        self._telemetry.people.set(len(self._people))
        self.write()
        return left

    @property
    def people(self) -> list[Person]:
        return list(self._people.values())


@dataclass(frozen=True, slots=True)
class PagePlaces:
    """Under which names the page is asked for, and from which pages it may be asked."""

    hosts: frozenset[str]
    origins: frozenset[str]

    @classmethod
    def of(cls, urls: Sequence[str]) -> PagePlaces:
        """Returns what these addresses allow."""
        hosts = {host for url in urls for host in (_host_of(url), _without_port(url))}
        return cls(frozenset(hosts - {""}), frozenset(map(_origin_of, urls)))

    def knows_host(self, host: str) -> bool:
        """Returns whether a `Host` of HTTP is one of the page's. A proxy with TLS passes one on whose port is not said."""
        return host.lower() in self.hosts

    def knows_origin(self, origin: str | None) -> bool:
        """Returns whether a request came from the page itself. One without an origin did not."""
        return origin is not None and _origin_of(origin) in self.origins


@dataclass(frozen=True, slots=True)
class ClientMaker:
    """How clients of the routers are made."""

    routers: str
    roots: bytes | None
    insecure: bool

    def make(self, key: str) -> AsyncClient:
        """Returns a client. Raises ValueError for a key that cannot be one, or would cross a network in the clear."""
        tls = None if self.roots is None else Tls(self.roots)
        return AsyncClient(self.routers, key=key or None, tls=tls, insecure=self.insecure)


def person_of(key: str) -> str:
    """Returns the name under which the console knows who has this key; empty: the key of the process."""
    return _digest(key)


def _digest(secret: str) -> str:
    return sha256(secret.encode(errors="replace")).hexdigest()


def _without_port(url: str) -> str:
    """Returns the host of an address with its scheme's own port, which browsers leave out; empty: it has another."""
    host, port = _host_of(url), _DEFAULT_PORTS.get(urlsplit(url.lower()).scheme, "")
    return host.removesuffix(f":{port}") if host.endswith(f":{port}") else ""


def _host_of(url: str) -> str:
    """Returns host:port of an address, in one spelling; empty: it is none."""
    try:
        parts = urlsplit(url.lower())
        port = parts.port
    except ValueError:
        return ""
    if not parts.hostname or parts.username is not None or parts.path not in ("", "/"):
        return ""
    return join_address(parts.hostname, port or _DEFAULT_PORTS.get(parts.scheme, ""))


def _origin_of(url: str) -> str:
    host = _host_of(url)
    return f"{urlsplit(url.lower()).scheme}://{host}" if host else ""
