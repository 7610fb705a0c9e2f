"""What survives a restart, and the interface of what keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar

from ryzanstein import errors
from ryzanstein.adapters import DeployedAdapter
from ryzanstein.auth.audit.audit_record import AuditRecord
from ryzanstein.cluster import Deployment, RolloutLimits
from ryzanstein.orchestrator.state.audit_table import AuditPage, AuditQuery

_T = TypeVar("_T")


class StoreError(Exception):
    """The store cannot be opened; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class StoredMembership:
    """The members, and the drain requests: node id to the incarnation that they are for."""

    members: frozenset[str] = frozenset()
    drains: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredRefusal:
    """A node failed to serve a revision of a model. It counts for `left_s` more seconds, from when it is read."""

    node_id: str
    model: str
    incarnation: str
    revision: int
    left_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class StoredHalt:
    """A revision of a model goes no further. `lasting`: until the model is deployed again, else until something moves."""

    model: str
    revision: int
    reason: str
    lasting: bool = True


@dataclass(frozen=True, slots=True)
class StoredState:
    """All that a control plane continues from."""

    deployments: tuple[Deployment, ...] = ()
    adapters: tuple[DeployedAdapter, ...] = ()
    membership: StoredMembership = field(default_factory=StoredMembership)
    refusals: tuple[StoredRefusal, ...] = ()
    halts: tuple[StoredHalt, ...] = ()


class StateStore(Protocol):
    """The store of an orchestrator.

    Methods raise UNAVAILABLE (STORE_UNAVAILABLE) when it fails, and NOT_LEADER when an orchestrator of a
    later epoch has written. Nothing is written by half.
    """

    fenced: Callable[[int], None]
    """Called with the epoch of a later leader whenever a write is refused for it."""

    async def next_epoch(self, known: int = 0) -> int:
        """Returns the epoch of a new leader, which is stored: above all before, and above `known`."""
        ...

    async def begin(self, epoch: int) -> None:
        """Begins to write as the leader of this epoch. Writes of earlier ones are refused from now on."""
        ...

    async def deployments(self) -> tuple[Deployment, ...]: ...

    async def put_deployment(self, deployment: Deployment) -> None: ...

    async def remove_deployment(self, model: str) -> None: ...

    async def adapters(self) -> tuple[DeployedAdapter, ...]: ...

    async def put_adapter(self, adapter: DeployedAdapter) -> None: ...

    async def remove_adapter(self, name: str) -> None: ...

    async def membership(self) -> StoredMembership:
        """Returns the membership as it was last written, before or after a restart."""
        ...

    async def save_membership(self, membership: StoredMembership) -> None:
        """Writes what differs from the last membership."""
        ...

    async def refusals(self) -> tuple[StoredRefusal, ...]:
        """Returns the refusals, by node and model."""
        ...

    async def save_refusals(self, refusals: Iterable[StoredRefusal]) -> None:
        """Writes them in place of those before."""
        ...

    async def halts(self) -> tuple[StoredHalt, ...]:
        """Returns the halts, by model."""
        ...

    async def save_halts(self, halts: Iterable[StoredHalt]) -> None:
        """Writes them in place of those before."""
        ...

    async def write(self, record: AuditRecord) -> None:
        """Keeps an operator's act. It is an `AuditSink`."""
        ...

    async def audit(self, query: AuditQuery) -> AuditPage:
        """Returns a page of operators' acts."""
        ...

    async def close(self) -> None: ...


def deployment_facts(deployment: Deployment) -> dict[str, Any]:
    """Returns what is stored of a deployment, for JSON."""
    return asdict(deployment)


def deployment_of(facts: Mapping[str, Any]) -> Deployment:
    """Returns a deployment as it was stored, without what a newer version says of it."""
    known = {**facts, "rollout": made(RolloutLimits, facts.get("rollout", {}))}
    known["idempotency_keys"] = tuple(facts.get("idempotency_keys", ()))
    return made(Deployment, known)


def made(kind: type[_T], facts: Mapping[str, Any]) -> _T:
    """Returns a value of its fields, without what a newer version says of it."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in facts.items() if name in names})


def not_leader(address: str = "", why: str = "this orchestrator stands by") -> errors.RyzansteinError:
    """Returns the refusal of an orchestrator that does not lead. It names the leader's address, where it is known."""
    where = f"; the leader is {address}" if address else ""
    return errors.RyzansteinError(
        f"{why}{where}", errors.Code.FAILED_PRECONDITION, "NOT_LEADER", {"leader": address} if address else {}
    )


async def read_state(store: StateStore) -> StoredState:
    """Returns what the store holds."""
    return StoredState(
        await store.deployments(), await store.adapters(), await store.membership(), await store.refusals(), await store.halts()
    )
