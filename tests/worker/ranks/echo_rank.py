"""A rank without a model, for tests of what surrounds ranks: real processes, channels and boards, no torch.

Rank 0 answers a submitted group with `max_tokens` steps of one token each, all ranks taking part in every step. The model
"name" says what goes wrong: "refuse", "crash", "never ready", "slow".
"""

import socket
import sys
import time

import msgspec

from ryzanstein.worker.engine.messages import ChoiceEnd, EngineStats, StepEvents, SubmitGroup
from ryzanstein.worker.ranks.channel import ChannelClosed, RankChannel
from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.ranks.messages import PEER_LOST, AgentMessage, CheckRanks, RankRefused
from ryzanstein.worker.ranks.starting import fork_server
from ryzanstein.worker.supervision.messages import RankReady

STEP_S = 0.002


class Step(msgspec.Struct, array_like=True):
    number: int
    check: int = 0


def run(_rank: int, fd: int) -> int:
    agent = RankChannel(socket.socket(fileno=fd), AgentMessage)
    (start,) = agent.wait()
    board = RankBoard(start.board_fd, start.spec.tp, start.rank)
    peers = [RankChannel(socket.socket(fileno=fd), Step) for fd in start.plan_fds]
    misbehave(start.spec.model, agent, board)
    agent.send(RankReady(start.rank, 128, 64, 16, 4, {"load": 0.0}))
    board.enter("idle")
    try:
        lead(agent, peers, board) if start.rank == 0 else follow(peers[0], board)
    except ChannelClosed:
        return PEER_LOST
    return 0


def misbehave(model: str, agent: RankChannel, board: RankBoard) -> None:
    if model == "refuse":
        agent.send(RankRefused("tensor lm_head.weight is missing"))
        raise SystemExit(0)
    if model == "crash":
        raise SystemExit(1)
    if model == "never ready":
        time.sleep(60)
    if model == "slow":
        for _ in range(8):
            time.sleep(0.25)
            board.move()


def lead(agent: RankChannel, peers: list[RankChannel], board: RankBoard) -> None:
    step = taken = 0
    while True:
        for message in agent.wait():
            taken += 1
            if isinstance(message, SubmitGroup):
                for index in range(message.max_tokens):
                    step += 1
                    began = time.monotonic()
                    for peer in peers:
                        peer.send(Step(step))
                    compute(board, step)
                    for peer in peers:
                        peer.wait()
                    board.end()
                    board.end_step()
                    ended = [ChoiceEnd(message.group, 0, 2, 0)] if index == message.max_tokens - 1 else []
                    stats = EngineStats(1, 0, 0, 0, 0, 0, 0, 0, step)
                    duration = time.monotonic() - began
                    agent.send(StepEvents(step, [message.group], [0], [index], {}, ended, [], stats, duration, taken=taken))
            else:
                if isinstance(message, CheckRanks):
                    board.answer(message.number)
                    for peer in peers:
                        peer.send(Step(0, message.number))
                stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, step)
                agent.send(StepEvents(step, [], [], [], {}, [], [], stats, 0.0, taken=taken))


def follow(lead_channel: RankChannel, board: RankBoard) -> None:
    while True:
        for step in lead_channel.wait():
            if step.check:
                board.answer(step.check)
                continue
            compute(board, step.number)
            lead_channel.send(step)
            board.end()
            board.end_step()


def compute(board: RankBoard, step: int) -> None:
    board.begin_step(step, 1)
    time.sleep(STEP_S)
    board.begin("all_reduce")


if __name__ == "__main__":
    sys.exit(fork_server.main(lambda: None, run))
