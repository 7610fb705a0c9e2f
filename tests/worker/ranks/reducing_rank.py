"""A rank without a model whose collectives are real: it computes for about as long as its peers, and sums, again and again.

After SIGUSR1 it computes five times as long.
"""

import random
import signal
import socket
import sys
import time
from typing import Never

import torch

from ryzanstein.worker.collectives.opening import GroupAddress, open_collectives
from ryzanstein.worker.collectives.waiting import WaitPolicy
from ryzanstein.worker.ranks.channel import ChannelClosed, RankChannel
from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.ranks.messages import PEER_LOST, AgentMessage, StartRank
from ryzanstein.worker.ranks.starting import fork_server
from ryzanstein.worker.supervision.messages import RankReady

COLLECTIVES_PER_STEP = 8
COMPUTE_S = (0.002, 0.004)


def run(_rank: int, fd: int) -> int:
    agent = RankChannel(socket.socket(fileno=fd), AgentMessage)
    (start,) = agent.wait()
    try:
        serve(agent, start)
    except ChannelClosed:
        return PEER_LOST


def serve(agent: RankChannel, start: StartRank) -> Never:
    board = RankBoard(start.board_fd, start.spec.tp, start.rank)
    torch.set_num_threads(1)
    group = open_collectives(GroupAddress("shm", start.segment_fd), start.rank, start.spec.tp, board, WaitPolicy(0.0, 0.0))
    factors = [1]
    signal.signal(signal.SIGUSR1, lambda *_: factors.append(5))
    agent.send(RankReady(start.rank, 128, 64, 16, 4, {"load": 0.0}))
    x_N, step, pause = torch.ones(4096), 0, random.Random(start.rank)
    while True:
        step += 1
        board.begin_step(step, 1)
        for _ in range(COLLECTIVES_PER_STEP):
            time.sleep(pause.uniform(*COMPUTE_S) * factors[-1])
            group.all_reduce(x_N)
        board.end_step()


if __name__ == "__main__":
    sys.exit(fork_server.main(lambda: None, run))
