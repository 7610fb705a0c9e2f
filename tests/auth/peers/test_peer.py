"""Identities: what is in a certificate, and what a client demands of the server that it dials."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.auth.peers.peer import PEER, Peer, PeerRole, check_name, checked_peer, checked_trust, peer_in, read_uri
from ryzanstein.errors import RyzansteinError

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=128).filter(str.isprintable)
TRUST = "ryzanstein.internal"


@given(st.sampled_from([role for role in PeerRole if role is not PeerRole.ORCHESTRATOR]), NAMES)
def test_an_identity_is_read_from_its_own_uri_and_no_other(role: PeerRole, name: str) -> None:
    peer = checked_peer(role, name)
    uri = peer.uri(TRUST)
    assert read_uri(uri, TRUST) == peer
    assert uri.isascii()
    for other in (uri + "/", uri.replace(TRUST, "other.internal"), uri[:-1], uri.upper(), f"x{uri}"):
        assert read_uri(other, TRUST) != peer


@given(NAMES, NAMES)
def test_ids_have_labels_of_dns_that_differ(one: str, other: str) -> None:
    names = [Peer(PeerRole.NODE, each).server_name(TRUST) for each in (one, other)]
    assert all(re.fullmatch(r"[a-z0-9-]{1,63}\.node\.ryzanstein\.internal", name) for name in names)
    assert (names[0] == names[1]) == (one == other)


def test_an_id_that_looks_like_a_digest_cannot_take_the_name_of_another() -> None:
    label = Peer(PeerRole.NODE, "A_1").server_name(TRUST).split(".")[0]
    assert label.startswith("x--")
    assert Peer(PeerRole.NODE, label).server_name(TRUST).split(".")[0] != label


def test_what_is_called_has_the_name_of_its_role_too() -> None:
    assert Peer(PeerRole.NODE, "n-1").dns_names(TRUST) == ["n-1.node.ryzanstein.internal", "node.ryzanstein.internal"]
    assert Peer(PeerRole.ORCHESTRATOR).dns_names(TRUST) == ["orchestrator.ryzanstein.internal"]
    assert Peer(PeerRole.OPERATOR, "me").dns_names(TRUST) == []


@pytest.mark.parametrize("name", ["", "a" * 129, "a\nb", "a\0"])
def test_names_that_no_certificate_has(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 128"):
        checked_peer(PeerRole.NODE, name)


@pytest.mark.parametrize("trust", ["", "A.b", "a b", ".a", "a/b", "a" * 200])
def test_names_that_are_no_trust_domain(trust: str) -> None:
    with pytest.raises(ValueError, match="DNS name"):
        checked_trust(trust)


def test_a_certificate_with_two_uris_is_nobodys() -> None:
    one = Peer(PeerRole.NODE, "n-1").uri(TRUST).encode()
    assert peer_in({"peer_uri": [one]}, TRUST) == Peer(PeerRole.NODE, "n-1")
    assert peer_in({"peer_uri": [one, b"spiffe://ryzanstein.internal/operator/me"]}, TRUST) is None
    assert peer_in({}, TRUST) is None
    assert peer_in({"peer_uri": [b"spiffe://other/node/n-1"]}, TRUST) is None


def test_a_peer_has_its_own_name_alone() -> None:
    check_name("anything")  # without TLS
    token = PEER.set(Peer(PeerRole.NODE, "n-1"))
    try:
        check_name("n-1")
        with pytest.raises(RyzansteinError, match="n-2") as caught:
            check_name("n-2")
        assert caught.value.reason == "NOT_YOUR_NAME"
    finally:
        PEER.reset(token)
