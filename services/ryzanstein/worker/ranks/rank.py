"""The program of ranks: `python -P -m ryzanstein.worker.ranks.rank` is the node's fork server.

The forks of this process are the ranks. The agent starts it, see `forking.ForkServer`. A rank exits
0 when the model is refused, PEER_LOST when it ends because another rank ended, 1 after a failure of
its own.
"""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Never

from ryzanstein.process.timeslice import take_usual_slices
from ryzanstein.worker.collectives import CollectiveTimeout
from ryzanstein.worker.engine.outcome import RanksUnsound
from ryzanstein.worker.ranks.channel import ChannelClosed, RankChannel
from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.ranks.messages import PEER_LOST, AgentMessage, RankCommand, RankCrashed, RankRefused, RankSpec, StartRank
from ryzanstein.worker.ranks.starting import fork_server
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.supervision.group import TOKENS

if TYPE_CHECKING:
    import structlog


def run(_rank: int, fd: int) -> int:
    """Runs a rank in its own process, driven by its channel to the agent. Returns the exit code."""
    take_usual_slices()
    agent: RankChannel[AgentMessage] = RankChannel(socket.socket(fileno=fd), AgentMessage)
    try:
        (start,) = agent.wait()
        assert isinstance(start, StartRank)
        return _run(agent, start)
    except ChannelClosed:
        return PEER_LOST


def _run(agent: RankChannel[AgentMessage], start: StartRank) -> int:
    """Serves, and reports to the agent why serving ended. Returns the exit code."""
    try:
        _serve(agent, start)
    except (ChannelClosed, CollectiveTimeout) as error:
        _log(start.spec, start.rank).warning("peer lost", reason=str(error))
        return PEER_LOST
    except ModelRefused as refusal:
        agent.send(RankRefused(str(refusal)))
        return 0
    except Exception as error:
        # Notify the agent first: lack of memory may be the failure, and logging needs some.
        agent.send(RankCrashed(start.rank, f"{type(error).__name__}: {error}"[:1024], isinstance(error, RanksUnsound)))
        _log(start.spec, start.rank).exception("rank failed")
        return 1


def prepare() -> None:
    """Imports in advance what takes a rank longest before it can load a model."""
    import ryzanstein.worker.collectives.shm
    import ryzanstein.worker.engine.engine
    import ryzanstein.worker.model.runner
    import ryzanstein.worker.ranks.loops
    import ryzanstein.worker.ranks.slab
    import ryzanstein.worker.ranks.starting.startup  # noqa: F401


def _log(spec: RankSpec, rank: int) -> structlog.stdlib.BoundLogger:
    """Sets up logging when there is something to log.

    The setup takes a tenth of a second, which a rank that serves never needs.
    """
    import structlog

    from ryzanstein.observe import log

    log.setup("worker", spec.log_level, node_id=spec.node_id, rank=rank)
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
    return logger


def _serve(agent: RankChannel[AgentMessage], start: StartRank) -> Never:
    board = RankBoard(start.board_fd, start.spec.tp, start.rank)
    from ryzanstein.worker.engine.engine import Engine
    from ryzanstein.worker.ranks import loops
    from ryzanstein.worker.ranks.health.recorder import StepRecorder
    from ryzanstein.worker.ranks.slab import RankSlab
    from ryzanstein.worker.ranks.starting import startup

    runner, ready = startup.load(start, board)
    recorder = StepRecorder(start.rank, start.spec.tp, board, agent.send)
    plans = [RankChannel[RankCommand](socket.socket(fileno=fd), RankCommand) for fd in start.plan_fds]
    slab = RankSlab(start.slab_fd, start.rank, runner, agent.send)
    if start.rank > 0:
        agent.send(ready)
        loops.Follower(runner, board, recorder, slab).run(plans[0])
    masks = loops.new_masks(start.spec, runner.vocab_size)
    executor = loops.RankExecutor(runner, board, plans, recorder, slab, masks=masks)
    settings = loops.engine_settings(start.spec, ready)
    constrained = loops.new_constrained(start.spec, masks, board)
    if start.spec.tokens:
        with executor.standing_still(TOKENS):
            constrained.know(start.spec.tokens)
    agent.send(ready)
    loops.Lead(agent, Engine(settings, executor), executor, constrained).run()


if __name__ == "__main__":
    sys.exit(fork_server.main(prepare, run))
