"""The policies by name, and which one a model has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ryzanstein.router.choose.limits import AnyLimit, QueueLimit, RecentLimit
from ryzanstein.router.choose.policy import LeastLoaded, Policy, RoundRobin, Sticky, by_capacity, rendezvous
from ryzanstein.router.choose.prefix import Prefix

# How settings, metrics and logs call them.
PolicyName = Literal["affinity", "bounded", "weighted", "prefix", "least_loaded", "round_robin"]


@dataclass(frozen=True, slots=True)
class PolicyBounds:
    """What the policies keep to: `queue_bound` sequences may wait on a session's node; within the window a node may carry
    `load_bound` times its fair share once it has had `bound_floor` requests; `prefix_entries` beginnings are remembered a
    model."""

    queue_bound: int = 32
    load_bound: float = 1.04
    bound_floor: int = 16
    prefix_entries: int = 65_536


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """`default`, but for the models that are named. `first_turn` is where round robin begins, another one on each router."""

    default: PolicyName = "affinity"
    by_model: Mapping[str, PolicyName] = field(default_factory=dict)
    bounds: PolicyBounds = field(default_factory=PolicyBounds)
    first_turn: int = 0

    def name(self, model: str) -> PolicyName:
        return self.by_model.get(model, self.default)

    def make(self, name: PolicyName) -> Policy:
        """A policy with a state of its own, where it has any."""
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
                # A node that has the beginning is preferred, not waited for.
                return Prefix(name, AnyLimit((QueueLimit(queue_bound=0), recent)), self.bounds.prefix_entries)
            case "least_loaded":
                return LeastLoaded(name)
            case "round_robin":
                return RoundRobin(name, self.first_turn)
