"""Where each policy sends requests, and where it must not."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest

from ryzanstein.cluster import Load, NodeState
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TextPrompt
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.router.choose import Affinity, ChoiceOutcome, Members, NodeView, PolicyName, ranked


def nodes(count: int = 4, **capacities: int) -> list[NodeView]:
    names = capacities or dict.fromkeys((f"n{i}" for i in range(count)), 8)
    return [NodeView(name, "m", NodeState.READY, Load(capacity=capacity)) for name, capacity in names.items()]


def session(number: int, home: str = "") -> Affinity:
    return Affinity(f"session:{number}".encode(), True, home=home)


def loaded(members: list[NodeView], **running: int) -> list[NodeView]:
    return [replace(node, load=replace(node.load, running=running.get(node.node_id, node.load.running))) for node in members]


def test_round_robin_gives_every_usable_node_the_same_number(make_desk: Any) -> None:
    members = nodes()
    members[1] = replace(members[1], suspected=True)
    chooser = make_desk("round_robin").chooser
    counts = Counter(chooser.candidates(members, "m", session(1))[0] for _ in range(30))
    assert counts == {"n0": 10, "n2": 10, "n3": 10}


def test_least_loaded_looks_at_the_load_for_its_size(make_desk: Any) -> None:
    chooser = make_desk("least_loaded").chooser
    members = loaded(nodes(small=4, large=16), small=2, large=4)
    assert chooser.candidates(members, "m", session(1)) == ["large", "small"]


@pytest.mark.parametrize("policy", [name for name in get_args(PolicyName) if name != "round_robin"])
def test_an_idle_cluster_does_not_send_everybody_to_one_node(make_desk: Any, policy: PolicyName) -> None:
    chooser = make_desk(policy).chooser
    affinities = [chooser.affinity_of(request(f"question {i}" + "x" * 400)) for i in range(400)]
    counts = Counter(chooser.candidates(nodes(), "m", affinity)[0] for affinity in affinities)
    assert len(counts) == 4
    assert max(counts.values()) < 1.4 * 100


def test_weighted_gives_nodes_sessions_in_proportion_to_their_capacity(make_desk: Any) -> None:
    chooser = make_desk("weighted").chooser
    members = nodes(a=8, b=16, c=32)
    counts = Counter(chooser.candidates(members, "m", session(i))[0] for i in range(7000))
    assert counts["a"] == pytest.approx(1000, rel=0.1)
    assert counts["b"] == pytest.approx(2000, rel=0.1)
    assert counts["c"] == pytest.approx(4000, rel=0.1)


def test_a_node_that_grows_takes_sessions_and_no_session_moves_between_others(make_desk: Any) -> None:
    chooser = make_desk("weighted").chooser
    before = {i: chooser.candidates(nodes(a=8, b=8, c=8), "m", session(i))[0] for i in range(1000)}
    after = {i: chooser.candidates(nodes(a=8, b=8, c=16), "m", session(i))[0] for i in range(1000)}
    moved = [i for i in before if before[i] != after[i]]
    assert moved
    assert {after[i] for i in moved} == {"c"}


def test_nodes_of_one_size_have_the_same_order_weighted_or_not(make_desk: Any) -> None:
    chooser = make_desk("weighted").chooser
    for i in range(50):
        assert chooser.candidates(nodes(), "m", session(i)) == ranked(session(i).key, ["n0", "n1", "n2", "n3"])


def test_bounded_keeps_every_node_within_the_bound_while_affinity_alone_does_not(make_desk: Any) -> None:
    """Few sessions that talk a lot: chance puts more of them on one node than on others."""
    excess = {}
    for policy in ("affinity", "bounded"):
        chooser = make_desk(policy).chooser
        counts = Counter(chooser.candidates(nodes(10), "m", session(i % 60))[0] for i in range(20_000))
        excess[policy] = max(counts.values()) / 2000 - 1
    assert excess["affinity"] > 0.15
    assert excess["bounded"] <= 0.05


def test_a_session_alone_stays_on_its_node_under_the_bound(make_desk: Any) -> None:
    """All the load there is lies on one node; that is no reason to move it."""
    desk = make_desk("bounded")
    first = home = desk.chooser.candidates(nodes(), "m", session(7))[0]
    for _ in range(1000):
        desk.clock.now += 2
        home = desk.chooser.candidates(nodes(), "m", session(7, home))[0]
        assert home == first


def test_a_session_whose_home_is_known_stays_there_and_its_backup_is_the_first_of_its_key(make_desk: Any) -> None:
    order = ranked(session(1).key, ["n0", "n1", "n2", "n3"])
    at_home = session(1, home=order[2])
    desk = make_desk("bounded")
    assert desk.chooser.candidates(nodes(), "m", at_home) == [order[2], order[0], order[1], order[3]]
    assert desk.observed.outcomes == {ChoiceOutcome.HOME: 1}
    assert make_desk("affinity").chooser.candidates(nodes(), "m", at_home) == order


def test_of_a_full_node_the_same_sessions_go_elsewhere_each_time(make_desk: Any) -> None:
    """Every key has its own bound: the overflow is a set of sessions, not whoever comes at the wrong moment."""
    desk = make_desk("bounded")
    members = nodes(2)
    mine = [i for i in range(400) if ranked(session(i).key, ["n0", "n1"])[0] == "n0"][:100]
    theirs = [i for i in range(400) if ranked(session(i).key, ["n0", "n1"])[0] == "n1"][:85]
    moved: Counter[int] = Counter()
    for turn in range(60):
        for i in [*mine, *theirs]:
            desk.clock.now += 0.02
            chosen = desk.chooser.candidates(members, "m", session(i))[0]
            moved[i] += turn >= 20 and i in mine and chosen == "n1"
    always = sum(moved[i] == 40 for i in mine)
    never = sum(moved[i] == 0 for i in mine)
    assert always >= 3
    assert always + never >= 90


def request(*texts: str) -> GenerationRequest:
    roles = [Role.USER, Role.ASSISTANT] * len(texts)
    return GenerationRequest(
        "m", ChatPrompt(tuple(Message(role, text) for role, text in zip(roles, texts, strict=False))), SamplingParams()
    )


def test_prefix_follows_the_longest_beginning_that_was_placed(make_desk: Any) -> None:
    """A popular template has the same key for all; the conversations behind it are told apart, turn after turn."""
    chooser = make_desk("prefix", bound_floor=1).chooser
    template = "You will summarize the following article. " * 40
    articles = [f"Article {i}. " * 400 for i in range(40)]
    first = [chooser.candidates(nodes(), "m", chooser.affinity_of(request(template + text)))[0] for text in articles]
    assert len(set(first)) == 4
    second = [
        chooser.candidates(nodes(), "m", chooser.affinity_of(request(template + text, "A summary.", "Shorter.")))[0]
        for text in articles
    ]
    assert sum(a == b for a, b in zip(first, second, strict=True)) >= 36


def test_prefix_does_not_send_everybody_to_where_a_shared_system_prompt_was(make_desk: Any) -> None:
    chooser = make_desk("prefix").chooser
    system = Message(Role.SYSTEM, "Be brief and kind. " * 500)
    prompts = [ChatPrompt((system, Message(Role.USER, f"{i} is my question" + "?" * 300))) for i in range(200)]
    affinities = [chooser.affinity_of(GenerationRequest("m", prompt, SamplingParams())) for prompt in prompts]
    counts = Counter(chooser.candidates(nodes(), "m", affinity)[0] for affinity in affinities)
    assert max(counts.values()) < 1.5 * 50
    assert all(outcome.marks for outcome in affinities)


def test_prefix_does_not_wait_in_the_queue_of_the_node_that_has_the_beginning(make_desk: Any) -> None:
    chooser = make_desk("prefix").chooser
    affinity = chooser.affinity_of(GenerationRequest("m", TextPrompt("once upon a time " * 100), SamplingParams()))
    holder = chooser.candidates(nodes(), "m", affinity)[0]
    full = [replace(node, load=Load(running=8, waiting=int(node.node_id == holder), capacity=8)) for node in nodes()]
    assert holder not in chooser.candidates(full, "m", affinity)[:2]


def test_it_is_counted_why_a_request_did_not_go_to_its_keys_node(make_desk: Any) -> None:
    desk = make_desk("affinity", queue_bound=2)
    primary, backup, *_ = ranked(session(1).key, ["n0", "n1", "n2", "n3"])
    full = Load(running=8, waiting=3, capacity=8)

    def primary_is(**values: object) -> list[NodeView]:
        return [replace(node, **values) if node.node_id == primary else node for node in nodes()]  # type: ignore[arg-type]

    for members, excluded, outcome in (
        (nodes(), (), ChoiceOutcome.PRIMARY),
        (primary_is(load=full), (), ChoiceOutcome.OVERFLOWED),
        (primary_is(drain_requested=True), (), ChoiceOutcome.UNUSABLE),
        (primary_is(linked=False), (), ChoiceOutcome.UNUSABLE),
        (nodes(), (primary,), ChoiceOutcome.EXCLUDED),
    ):
        desk.observed.outcomes.clear()
        chosen = desk.chooser.candidates(members, "m", session(1), excluded)[0]
        assert (chosen == primary) is (outcome is ChoiceOutcome.PRIMARY)
        assert chosen in (primary, backup)
        assert desk.observed.outcomes == {outcome: 1}


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_asking_who_would_be_the_backup_is_no_placement(make_desk: Any, policy: PolicyName) -> None:
    members, asked, unasked = nodes(2), make_desk(policy), make_desk(policy)
    for number in range(400):
        for _ in range(5):
            asked.chooser.rank(Members.of(members), "m", session(number % 40), ("n0",))
        assert asked.chooser.candidates(members, "m", session(number)) == unasked.chooser.candidates(
            members, "m", session(number)
        )
    assert asked.observed.outcomes == unasked.observed.outcomes
    assert asked.observed.outcomes.total() == 400


def test_questions_move_no_requests_to_the_other_node(make_desk: Any) -> None:
    chooser = make_desk("bounded").chooser
    counts: Counter[str] = Counter()
    for _ in range(2000):
        chooser.rank(Members.of(nodes(2)), "m", session(1), ("n0",))
    for number in range(400):
        counts[chooser.candidates(nodes(2), "m", session(number))[0]] += 1
    assert max(counts.values()) < 230


def test_a_node_is_bounded_from_its_own_floor_on_and_judged_from_another(make_desk: Any) -> None:
    """Three routers see a third of the traffic each: a bound that waits for as much as a judgement comes late."""
    desk = make_desk("bounded")
    only = [number for number in range(200) if ranked(session(number).key, ["n0", "n1", "n2", "n3"])[0] == "n0"]
    counts = Counter(desk.chooser.candidates(nodes(), "m", session(number))[0] for number in only[:40])
    assert counts["n0"] < 25
    assert desk.observed.alarms in ([], [False])


def test_the_settings_name_the_valid_policies_when_one_is_unknown() -> None:
    for flags, field in ((["--policy", "best"], "policy"), (["--model-policy", "a/b=best"], "model_policy.a/b")):
        ended = subprocess.run([sys.executable, "-m", "ryzanstein.router", *flags], capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"{field}: ")
        assert all(name in ended.stderr for name in get_args(PolicyName))
