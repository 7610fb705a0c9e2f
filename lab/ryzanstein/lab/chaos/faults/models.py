"""Ranks of one model where nodes serve several, whole nodes with all their models, and nodes with adapters.

The struck model has the same promises as if it were the only one. The answers of the other models
must not notice.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Victim
from ryzanstein.lab.chaos.faults import ranks
from ryzanstein.lab.chaos.faults.nodes import DEATH_S, LINK_DOWN
from ryzanstein.lab.chaos.questions import ADAPTED_KINDS
from ryzanstein.lab.chaos.stage.layouts import ADAPTED, MODELS
from ryzanstein.lab.chaos.stage.signals import send
from ryzanstein.lab.chaos.stage.stage import Stage
from ryzanstein.lab.chaos.trial.spared import node_of, of_model

# Less than a fault of its own would cost an answer that stays on its node: ranks that restart take
# 0.7 s and more, a stalled rank two seconds. On two cores that the restart of the struck ranks shares
# with everything else, the longest pause is 0.02 to 0.3 s.
PAUSE_S = 0.5
# A restart of ranks takes longer.
_IN_FLIGHT_S = 0.1
_OF_FIRST = ("greedy", "sampled", "n3")
_KINDS = (*_OF_FIRST, "second-greedy", "second-sampled", "second-n3")


@asynccontextmanager
async def _crashed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Ends all ranks of the model on this node at once, as a bug of its kernels does."""
    for pid in stage.rank_pids[victim.node_id]:
        send(pid, signal.SIGSEGV)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _dead_everywhere(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    names = [name for name in stage.rank_pids if of_model(name) == of_model(victim.node_id)]
    for name in names:
        for pid in stage.rank_pids[name]:
            send(pid, signal.SIGKILL)
    yield frozenset(names)


@asynccontextmanager
async def _node_killed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    node = node_of(victim.node_id)
    stage.cluster.kill(node)
    yield frozenset(name for name in stage.rank_pids if node_of(name) == node)


def _of_one_model(name: str, what: str, like: Fault) -> Fault:
    """Returns a fault of ranks that strikes one model of a node."""
    return replace(like, name=name, what=what, layout=MODELS, kinds=_KINDS, spared_pause_s=PAUSE_S)


_KILLED = next(fault for fault in ranks.FAULTS if fault.name == "sigkill_rank_0")
_STOPPED = next(fault for fault in ranks.FAULTS if fault.name == "sigstop_rank")
_SLOW = next(fault for fault in ranks.FAULTS if fault.name == "slow_rank")
_MEMORY = next(fault for fault in ranks.FAULTS if fault.name == "rank_out_of_memory")
FAULTS = (
    _of_one_model("model_rank_killed", "SIGKILL of a rank of one of two models", _KILLED),
    _of_one_model("model_rank_stopped", "SIGSTOP of a rank of one of two models", _STOPPED),
    _of_one_model("model_rank_slow", f"a rank of one of two models {ranks.SLOWER} times slower", _SLOW),
    replace(
        _of_one_model("model_out_of_memory", "the ranks of one of two models cannot map more memory", _MEMORY),
        # The other model's context is too short for the long prompts.
        kinds=_OF_FIRST,
    ),
    replace(
        _of_one_model("model_crashed", "SIGSEGV of all ranks of one of two models, on one node", _KILLED),
        strike=_crashed,
    ),
    replace(
        _of_one_model("model_dead_everywhere", "SIGKILL of all ranks of one of two models, on all nodes", _KILLED),
        strike=_dead_everywhere,
        resumes=Resume.ANY,
        in_flight_s=_IN_FLIGHT_S,
        bounds=replace(_KILLED.bounds, rerouted_s=None),
    ),
    Fault(
        "adapter_node_killed",
        "SIGKILL of a node's agent in the middle of an adapter's answer",
        _node_killed,
        (LINK_DOWN,),
        ADAPTED,
        bounds=FaultBounds(DEATH_S),
        kinds=tuple(f"{name}-{kind}" for name in ADAPTED.adapters for kind in ADAPTED_KINDS),
    ),
    Fault(
        "models_node_killed",
        "SIGKILL of the agent of a node with two models",
        _node_killed,
        (LINK_DOWN,),
        MODELS,
        bounds=FaultBounds(DEATH_S),
        kinds=_KINDS,
    ),
)
