"""The policies by name, and which one a model has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ryzanstein.router.choose.limits import AnyLimit, QueueLimit, RecentLimit
from ryzanstein.router.choose.policy import LeastLoaded, Policy, RoundRobin, Sticky, by_capacity, rendezvous
from ryzanstein.router.choose.prefix import Prefix

# The names used in settings, metrics and logs.
PolicyName = Literal["affinity", "bounded", "weighted", "prefix", "least_loaded", "round_robin"]


@dataclass(frozen=True, slots=True)
class PolicyBounds:
    """The bounds of the policies.

    `queue_bound` sequences may wait on a session's node. Within the window, a node may have
    `load_bound` times its fair share once it has had `bound_floor` requests. `prefix_entries`
    beginnings are remembered per model.
    """

    queue_bound: int = 32
    load_bound: float = 1.04
    bound_floor: int = 16
    prefix_entries: int = 65_536


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """The `default` policy, and exceptions for named models.

    `first_turn` is where round robin begins; it differs between routers.
    """

    default: PolicyName = "affinity"
    by_model: Mapping[str, PolicyName] = field(default_factory=dict)
    bounds: PolicyBounds = field(default_factory=PolicyBounds)
    first_turn: int = 0

    def name(self, model: str) -> PolicyName:
        return self.by_model.get(model, self.default)

    def make(self, name: PolicyName) -> Policy:
        """Returns a new policy. If it has state, the state is its own."""
        queue = QueueLimit(self.bounds.queue_bound)
        recent = RecentLimit(self.bounds.load_bound, self.bounds.bound_floor)
        match name:
            case "affinity":
                return Sticky(name, rendezvous, queue)
            case "bounded":
                return Sticky(name, rendezvous, AnyLimit((queue, recent)), homing=True)
            case "weighted":
                return Sticky(name, by_capacity, queue)
            case "prefix":
                # A node that has the beginning is preferred, but a request does not wait for it.
                return Prefix(name, AnyLimit((QueueLimit(queue_bound=0), recent)), self.bounds.prefix_entries)
            case "least_loaded":
                return LeastLoaded(name)
            case "round_robin":
                return RoundRobin(name, self.first_turn)
