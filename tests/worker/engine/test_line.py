"""The waiting line and its accounts: whose turn it is, and who is lifted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.worker.engine.scheduling.queue import OrderedSequences, WaitingLine, first_to_yield
from ryzanstein.worker.engine.sequence import Accounts, Sequence, SequenceGroup


class Line:
    """A line that is filled with groups of one sequence."""

    def __init__(self, group) -> None:
        self.line = WaitingLine(16)
        self.group = group
        self.num = 0

    def join(self, tenant: str, priority: int = 0, generated: tuple[int, ...] = ()) -> Sequence:
        message = self.group(self.num, [1, 2, 3], priority=priority, tenant=tenant, generated=[list(generated)])
        sequence = Sequence(SequenceGroup(message, self.num, 0.0, self.line.open(priority, tenant)), 0)
        self.num += 1
        self.line.insert(sequence)
        return sequence


arrivals = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1)), max_size=20)


@given(arrivals=arrivals, charge=st.integers(0, 9))
def test_in_turn_is_the_order_in_which_they_would_be_admitted(group, arrivals, charge) -> None:
    it = Line(group)
    for tenant, priority in arrivals:
        it.join(tenant, priority)
    expected = list(it.line.in_turn(charge))
    admitted = []
    while (first := it.line.first) is not None:
        it.line.remove(first)
        first.group.account.counter += charge
        admitted.append(first)
    assert [s.group.id for s in admitted] == [s.group.id for s in expected]
    assert len(admitted) == len(arrivals)


@given(arrivals=arrivals)
def test_the_line_counts_what_is_in_it(group, arrivals) -> None:
    it = Line(group)
    joined = [it.join(tenant, priority) for tenant, priority in arrivals]
    for i, sequence in enumerate(joined):
        assert sequence in it.line
        it.line.remove(sequence)
        it.line.close(sequence.group)
        assert sequence not in it.line
        assert len(it.line) == sum(it.line.num_waiting.values()) == len(joined) - i - 1
    assert it.line.first is None


def test_who_comes_is_lifted_to_the_least_of_those_that_wait(group) -> None:
    it = Line(group)
    it.join("a").group.account.counter = 50
    it.join("b").group.account.counter = 30
    assert it.join("c").group.account.counter == 30


def test_who_waits_already_is_not_lifted(group) -> None:
    it = Line(group)
    behind = it.join("a").group.account
    it.join("b").group.account.counter = 30
    it.join("a")
    assert behind.counter == 0


def test_who_comes_to_an_empty_line_starts_where_the_last_one_left_it(group) -> None:
    it = Line(group)
    last = it.join("a")
    last.group.account.counter = 40
    it.line.remove(last)
    assert it.join("b").group.account.counter == 40


def test_a_debt_is_kept_while_its_tenant_is_idle() -> None:
    accounts = Accounts(4)
    debtor = accounts.open("a", ())
    debtor.counter = 90
    accounts.close(debtor)
    assert accounts.open("a", ()).counter == 90


def test_the_least_counters_of_idle_tenants_are_forgotten() -> None:
    accounts = Accounts(4)
    for i in range(5):
        account = accounts.open(f"t{i}", ())
        account.counter = i
        accounts.close(account)
    assert len(accounts) == 2
    assert accounts.open("t4", ()).counter == 4


def running(group, *members: tuple[str, int, int]) -> tuple[OrderedSequences, dict[int, Sequence]]:
    """Sequences (tenant, counter of its account, priority) in order of admission."""
    it, sequences = Line(group), OrderedSequences("rank")
    made = {}
    for i, (tenant, counter, priority) in enumerate(members):
        sequence = made[i] = it.join(tenant, priority)
        sequence.group.account.counter = counter
        sequence.rank = (-priority, i)
        sequences.insert(sequence)
    return sequences, made


def test_of_one_tenant_the_last_admitted_gives_way(group) -> None:
    sequences, made = running(group, ("a", 9, 0), ("a", 9, 0), ("a", 9, 0))
    assert first_to_yield(sequences) is made[2]


def test_a_tenant_far_ahead_gives_way_before_one_that_came_later(group) -> None:
    sequences, made = running(group, ("a", 100, 0), ("a", 100, 0), ("b", 10, 0))
    assert first_to_yield(sequences) is made[1]


def test_a_small_lead_is_not_worth_computing_again(group) -> None:
    sequences, made = running(group, ("a", 13, 0), ("a", 13, 0), ("b", 10, 0))
    assert first_to_yield(sequences) is made[2]


def test_a_lower_priority_gives_way_whatever_its_tenant_had(group) -> None:
    sequences, made = running(group, ("a", 0, -1), ("b", 500, 0), ("c", 0, 0))
    assert first_to_yield(sequences) is made[0]
