"""The election, step by step, and in worlds where everything goes wrong."""

from __future__ import annotations

import pytest
from tests.orchestrator.leading.election_model import Perils, Run

from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.orchestrator.leading.election import Election
from ryzanstein.orchestrator.leading.lease import LeaseRecord

WORLDS = {
    "usual": Perils(),
    "stopped processes": Perils(pause=0.15),
    "bad network": Perils(loss=0.25, slow=0.2, partition=0.05),
    "clocks 20 % apart": Perils(rates=(0.9, 1.1)),
    "a lease service that forgets": Perils(forgets=True),
}


@pytest.mark.parametrize("name", WORLDS)
def test_no_two_leaders_act_and_no_node_obeys_an_earlier_one(name):
    assert sum(Run(seed, WORLDS[name]).run() for seed in range(12)) > 24, "leaders changed, and moved models"


@pytest.mark.lab
@pytest.mark.parametrize("name", WORLDS)
def test_no_two_leaders_act_in_many_more_worlds(name):
    for seed in range(12, 1500):
        Run(seed, WORLDS[name]).run()


@pytest.mark.lab
def test_no_node_obeys_an_earlier_leader_with_any_clocks():
    """Two leaders may act then, at one time; of that nodes know nothing."""
    for seed in range(500):
        Run(seed, Perils(rates=(0.5, 2.0), forgets=True)).run()


def test_the_model_finds_two_leaders_where_clocks_differ_too_much():
    def runs():
        for seed in range(200):
            Run(seed, Perils(rates=(0.4, 2.5))).run()

    with pytest.raises(AssertionError, match=r"two leaders act|an earlier leader moved"):
        runs()


class Driven:
    """An election with a record that a test writes."""

    def __init__(self, clock):
        self.election = Election("me", "me:1", clock)
        self.clock, self.version = clock, 0

    def step(self):
        """What a campaign does, with a service that answers at once."""
        write = self.election.wanted()
        if write is not None:
            self.version += 1
            record = write.record
            self.election.written(
                write, LeaseRecord(f"v{self.version}", record.holder, record.address, record.epoch), self.clock()
            )
        return write


def test_a_lease_that_nobody_holds_is_taken_after_its_length(clock):
    driven = Driven(clock)
    assert driven.step() is None, "it has not read the record yet"
    driven.election.read(LeaseRecord())
    clock.now += 4.9
    assert driven.election.runs_out_in_s == pytest.approx(0.1)
    assert driven.step() is None
    clock.now += 0.2
    assert driven.step().record == LeaseRecord("", "me", "me:1", 1)
    assert driven.election.tenure.leader == LeaderEpoch(1, "me")


def test_a_lease_that_was_given_back_is_taken_at_once_and_kept_for_longer(clock):
    driven = Driven(clock)
    driven.election.read(LeaseRecord("x", "", "", 7))
    driven.step()
    assert driven.election.tenure.leader.epoch == 8
    assert driven.election.tenure.keeps_until == clock.now + 3.5


def test_a_leader_acts_for_three_seconds_from_the_start_of_its_last_renewal(clock):
    driven = Driven(clock)
    driven.election.read(LeaseRecord("x", "", "", 7))
    driven.step()
    write, started = driven.election.wanted(), clock.now
    assert write.renews
    clock.now += 0.9
    driven.election.written(write, LeaseRecord("y", "me", "me:1", 8), started)
    clock.now = started + 2.99
    assert driven.election.tenure is not None
    clock.now = started + 3.0
    assert driven.election.tenure is None
    driven.election.written(write, LeaseRecord("z", "me", "me:1", 8), clock.now)
    assert driven.election.tenure is None, "a term that is over does not begin again"


@pytest.mark.parametrize(
    "found",
    [LeaseRecord(), LeaseRecord("o", "other", "o:1", 9), LeaseRecord("o", "me", "me:1", 7), LeaseRecord("o", "other", "", 3)],
)
def test_a_leader_that_finds_another_record_leads_no_more(clock, found):
    driven = Driven(clock)
    driven.election.read(LeaseRecord("x", "", "", 7))
    driven.step()
    driven.election.read(LeaseRecord("lost answer", "me", "me:1", 8))
    assert driven.election.tenure is not None, "its own write, of which it did not hear"
    driven.election.read(found)
    assert driven.election.tenure is None
    assert driven.step() is None
    clock.now += 5
    assert driven.step().record.epoch == max(found.epoch, 8) + 1


def test_a_leader_that_a_peer_knows_to_be_stale_writes_the_higher_epoch_and_waits(clock):
    driven = Driven(clock)
    driven.election.read(LeaseRecord("x", "", "", 7))
    driven.step()
    driven.election.outranked(LeaderEpoch(20, "other"))
    assert driven.election.tenure is None, "the store has what a later leader wrote"
    assert driven.step().record == LeaseRecord("v1", "me", "me:1", 20)
    assert driven.step() is None
    clock.now += 5
    assert driven.step().record.epoch == 21
    assert driven.election.tenure is not None


def test_a_leader_that_a_peer_doubts_asks_for_the_lease_and_goes_on_above_what_the_peer_knows(clock):
    driven = Driven(clock)
    driven.election.read(LeaseRecord("x", "", "", 7))
    driven.step()
    driven.election.doubted(LeaderEpoch(20, "other"))
    assert driven.election.tenure.leader.epoch == 8, "whether it leads, the service of the lease says"
    assert driven.step().record.epoch == 21
    assert driven.election.tenure.leader == LeaderEpoch(21, "me")
    assert driven.election.tenure.keeps_until == clock.now + 3.5
    driven.election.doubted(LeaderEpoch(30, "other"))
    driven.election.wanted()
    driven.election.read(LeaseRecord("lost answer", "me", "me:1", 31))
    assert driven.election.tenure.leader.epoch == 21, "its own write, of which it did not hear"
    driven.step()
    assert driven.election.tenure.leader.epoch == 31
    driven.election.doubted(LeaderEpoch(40, "other"))
    driven.election.read(LeaseRecord("o", "other", "o:1", 40))
    assert driven.election.tenure is None


def test_peers_that_say_more_and_more_cannot_keep_a_leader_from_leading(clock):
    driven = Driven(clock)
    driven.election.read(LeaseRecord("x", "", "", 7))
    driven.step()
    terms = set()
    for number in range(600):
        clock.now += 0.5
        driven.election.doubted(LeaderEpoch(1000 * number, "liar"))
        driven.step()
        terms.add(driven.election.tenure.leader)
    assert 5 <= len(terms) <= 1 + 5 + 5, "five at once, then one a minute"


def test_who_resigns_gives_back_what_it_holds_and_stands_no_more(clock):
    driven = Driven(clock)
    driven.election.read(LeaseRecord("x", "", "", 7))
    driven.step()
    back = driven.election.resign()
    assert (back.seen.version, back.record.holder, back.record.epoch) == ("v1", "", 8)
    assert driven.election.tenure is None
    clock.now += 60
    assert driven.step() is None
    assert driven.election.resign() is None
