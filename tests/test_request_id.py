"""The id of a call is the client's where it is one, by the same rule on every face."""

from __future__ import annotations

import os
import re

import pytest

from ryzanstein.request_id import random_id, random_seed, request_id


@pytest.mark.parametrize("given", ["a", "0d7c-1", "~" * 128, "!x/y=z"])
def test_visible_ascii_stays(given: str) -> None:
    assert request_id(given) == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "a\n", "\x00", "x" * 10**6])
def test_anything_else_is_replaced(given: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", request_id(given))


def test_random_numbers_are_each_given_once_also_after_a_fork() -> None:
    given = [bytes.fromhex(random_id()) for _ in range(1000)]
    given += [random_seed().to_bytes(8) * 2 for _ in range(1000)]
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, bytes.fromhex("".join(random_id() for _ in range(200))))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        of_child = answer.read()
    given += [of_child[at : at + 16] for at in range(0, len(of_child), 16)]
    given += [bytes.fromhex(random_id()) for _ in range(200)]
    assert len(given) == len(set(given)) == 2400
    os.wait()
