"""Who sends a key: one look-up, one digest, one comparison, whatever is wrong with it."""

from __future__ import annotations

import contextlib
import hmac
import logging
import pickle
import traceback
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ryzanstein.auth import refusals
from ryzanstein.auth.caller import DEFAULT_SCOPES, EVERYTHING, Caller, Scope
from ryzanstein.auth.credential import Credential
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys import records
from ryzanstein.auth.keys.keys_text import snapshot_of
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.auth.tenants import NO_LIMITS, TenantLimits, TenantRules
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.access.authenticator import Authenticator
from ryzanstein.router.access.keys import Keys
from ryzanstein.router.access.optional import OptionalKeys
from ryzanstein.router.access.stores.source import FoundKeys, HeldKeys
from ryzanstein.router.access.telemetry import outcome_of

NOW = 1.8e9
PLAIN, GATEWAY, SHORT, DEAD = (ApiKey.new() for _ in range(4))
RULES = {
    "acme": TenantRules(TenantLimits(concurrent=3), "", 5),
    "group:x": TenantRules(cache_group="all"),
    "*": TenantRules(TenantLimits(concurrent=1)),
}


def record(key: ApiKey, **more: Any) -> KeyRecord:
    return KeyRecord(key.key_id, key.digest(), **{"tenant": "acme", "scopes": DEFAULT_SCOPES, **more})


RECORDS = (
    record(PLAIN, models=frozenset({"demo"})),
    record(GATEWAY, tenant="gateway", scopes=EVERYTHING),
    record(SHORT, expires=NOW + 10, max_priority=-2),
    record(DEAD),
)


class Time:
    """The clocks of a test."""

    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def held(clock: Time) -> HeldKeys:
    made = HeldKeys(max_age_s=900, clock=clock)
    made.hold(FoundKeys(snapshot_of(RECORDS, RULES, {DEAD.key_id: NOW - 5})))
    return made


@pytest.fixture
def keys(held: HeldKeys, clock: Time) -> Keys:
    return Keys(held, clock)


def sent(key: ApiKey, tenant: str = "") -> Credential:
    return Credential(key.reveal(), tenant)


def refusal(authenticator: Authenticator, credential: Credential) -> str:
    with pytest.raises(RyzansteinError) as error:
        authenticator.authenticate(credential)
    return error.value.reason


def test_a_key_names_its_caller(keys: Keys) -> None:
    caller = keys.authenticate(sent(PLAIN))
    assert caller == Caller("acme", PLAIN.key_id, DEFAULT_SCOPES, frozenset({"demo"}), 5, "acme", None)
    assert keys.authenticate(sent(PLAIN, "acme")) == caller
    short = keys.authenticate(sent(SHORT))
    assert (short.max_priority, short.ends) == (-2, NOW + 10)
    assert not keys.is_open


def test_only_a_key_that_may_act_for_others_names_a_tenant(keys: Keys) -> None:
    assert refusal(keys, sent(PLAIN, "gateway")) == "TENANT_NOT_YOURS"
    assert keys.authenticate(sent(GATEWAY)).tenant == "gateway"
    caller = keys.authenticate(sent(GATEWAY, "acme"))
    assert (caller.tenant, caller.cache_scope, caller.key_id, caller.max_priority) == ("acme", "acme", GATEWAY.key_id, 5)
    assert keys.ended(caller) is None


def test_no_name_of_a_tenant_gives_the_cache_of_another_or_of_a_group(keys: Keys) -> None:
    names = ["acme", "all", "group:all", "tenant:group:all", "tenant:tenant:group:all", "tenant:all"]
    scopes = {keys.authenticate(sent(GATEWAY, name)).cache_scope for name in names}
    assert len(scopes) == len(names)
    group = keys.authenticate(sent(GATEWAY, "group:x")).cache_scope
    assert group == "group:all"
    assert group not in scopes


def test_tenants_without_a_table_have_the_limits_of_every_other_one(keys: Keys, held: HeldKeys) -> None:
    assert (keys.limits_of("acme").concurrent, keys.limits_of("someone").concurrent) == (3, 1)
    held.hold(FoundKeys(snapshot_of(RECORDS, {}, {})))
    assert keys.limits_of("acme") == keys.limits_of("someone") == NO_LIMITS


UNKNOWN = ApiKey.new()
WRONG = ApiKey(PLAIN.key_id, UNKNOWN.secret)
LONG_COMMON = ApiKey(PLAIN.key_id, PLAIN.secret[:-1] + ("a" if PLAIN.secret[-1] != "a" else "b"))
TWO = Credential(fault=refusals.key_ambiguous())


@pytest.mark.parametrize(
    ("credential", "reason"),
    [
        (Credential(), "KEY_MISSING"),
        (TWO, "KEY_AMBIGUOUS"),
        (Credential("sk-something"), "KEY_INVALID"),
        (Credential(PLAIN.reveal()[:-1]), "KEY_INVALID"),
        (sent(UNKNOWN), "KEY_INVALID"),
        (sent(WRONG), "KEY_INVALID"),
        (sent(LONG_COMMON), "KEY_INVALID"),
        (sent(DEAD), "KEY_REVOKED"),
        (sent(ApiKey(DEAD.key_id, UNKNOWN.secret)), "KEY_INVALID"),
    ],
)
def test_what_is_no_valid_key_is_refused(keys: Keys, credential: Credential, reason: str) -> None:
    assert refusal(keys, credential) == reason


def test_malformed_unknown_and_wrong_keys_get_the_same_answer(keys: Keys) -> None:
    answers = []
    for credential in (Credential("rz_"), sent(UNKNOWN), sent(WRONG), sent(LONG_COMMON)):
        with pytest.raises(RyzansteinError) as error:
            keys.authenticate(credential)
        answers.append((str(error.value), error.value.code, error.value.reason, error.value.metadata))
    assert len({repr(answer) for answer in answers}) == 1


@pytest.mark.parametrize(
    "key", [PLAIN, UNKNOWN, WRONG, LONG_COMMON, DEAD], ids=["right", "unknown", "wrong", "common", "revoked"]
)
def test_each_key_is_compared_once_with_as_many_characters(keys: Keys, key: ApiKey, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    original = hmac.compare_digest

    def noted(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return original(one, other)

    monkeypatch.setattr(records.hmac, "compare_digest", noted)  # type: ignore[attr-defined]
    with contextlib.suppress(RyzansteinError):
        keys.authenticate(sent(key))
    assert compared == [(64, 64)]


def test_a_key_ends_when_it_expires(keys: Keys, clock: Time) -> None:
    caller = keys.authenticate(sent(SHORT))
    clock.now = NOW + 9.9
    assert keys.ended(caller) is None
    clock.now = NOW + 10
    ended = keys.ended(caller)
    assert ended is not None
    assert (ended.reason, refusal(keys, sent(SHORT))) == ("KEY_EXPIRED", "KEY_EXPIRED")


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (RECORDS, None),
        (RECORDS[1:], "KEY_REVOKED"),
        ((replace(RECORDS[0], tenant="other"), *RECORDS[1:]), "KEY_REVOKED"),
        ((replace(RECORDS[0], tenant="other", scopes=EVERYTHING), *RECORDS[1:]), None),
    ],
    ids=["all", "removed", "of another tenant", "acts for it"],
)
def test_who_was_let_in_ends_with_its_key(keys: Keys, held: HeldKeys, left: tuple[KeyRecord, ...], reason: str | None) -> None:
    caller = keys.authenticate(sent(PLAIN))
    held.hold(FoundKeys(snapshot_of(left, {}, {})))
    ended = keys.ended(caller)
    assert (ended and ended.reason) == reason
    held.hold(FoundKeys(snapshot_of(left, {}, {PLAIN.key_id: NOW})))
    ended = keys.ended(caller)
    assert ended is not None
    assert ended.reason == "KEY_REVOKED"


def test_a_gateway_that_may_no_longer_act_for_others_ends(keys: Keys, held: HeldKeys) -> None:
    own, others = keys.authenticate(sent(GATEWAY)), keys.authenticate(sent(GATEWAY, "acme"))
    held.hold(FoundKeys(snapshot_of((replace(RECORDS[1], scopes=frozenset({Scope.INFER})),), {}, {})))
    assert keys.ended(own) is None
    assert keys.ended(others) is not None


def test_keys_that_are_too_old_are_unavailable_and_never_invalid(keys: Keys, held: HeldKeys, clock: Time) -> None:
    caller = keys.authenticate(sent(PLAIN))
    clock.now += 900
    assert keys.authenticate(sent(PLAIN)) == caller
    clock.now += 1
    for credential in (sent(PLAIN), sent(UNKNOWN), Credential("rz_"), sent(DEAD)):
        assert refusal(keys, credential) == "KEYS_UNAVAILABLE"
    ended = keys.ended(caller)
    assert ended is not None
    assert ended.reason == "KEYS_UNAVAILABLE"
    assert refusal(keys, Credential()) == "KEY_MISSING"
    held.confirm()
    assert keys.authenticate(sent(PLAIN)) == caller


def test_before_the_first_keys_nobody_is_told_that_a_key_is_invalid() -> None:
    assert refusal(Keys(HeldKeys(max_age_s=900)), sent(PLAIN)) == "KEYS_UNAVAILABLE"


def test_optional_keys_let_in_who_sends_none_and_refuse_what_is_bad(keys: Keys) -> None:
    optional = OptionalKeys(keys)
    assert optional.is_open
    assert optional.authenticate(Credential()) == Caller()
    assert optional.authenticate(Credential("", "acme")) == Caller("acme")
    assert optional.ended(Caller("acme")) is None
    assert optional.authenticate(sent(PLAIN)).key_id == PLAIN.key_id
    for credential in (sent(UNKNOWN), TWO, Credential("sk-x")):
        assert refusal(optional, credential).startswith("KEY_")
    ended = optional.ended(Caller("acme", DEAD.key_id))
    assert ended is not None


# What a client, or a proxy before it, may send: the key of a tenant, nearly that, and anything.
VALUES = st.one_of(
    st.sampled_from([f"Bearer {PLAIN.reveal()}", f"bearer  {PLAIN.reveal()} ", PLAIN.reveal(), "Bearer", "Basic YTpi", ""]),
    st.tuples(st.integers(0, 63), st.characters()).map(
        lambda at: PLAIN.reveal()[: at[0]] + at[1] + PLAIN.reveal()[at[0] + 1 :]
    ),
    st.text(max_size=100).map(lambda text: f"Bearer {text}"),
    st.binary(max_size=100),
    st.just("Bearer " + "x" * 9000),
)
NAMES = st.sampled_from(["authorization", "x-api-key", "api-key", "authorization-bin", "x-tenant-id", "cookie"])


@given(st.lists(st.tuples(NAMES, VALUES), max_size=4), st.sampled_from(["", PLAIN.reveal(), "x"]))
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_has_a_typed_answer_and_only_a_key_lets_in(
    keys: Keys, headers: list[tuple[str, str | bytes]], also: str
) -> None:
    result: Caller | RyzansteinError
    try:
        result = keys.authenticate(Credential.read(headers, also))
    except RyzansteinError as error:
        result = error
    if isinstance(result, Caller):
        assert (result.tenant, result.key_id) == ("acme", PLAIN.key_id)
        texts = [value if isinstance(value, str) else value.decode("latin-1") for _, value in headers]
        assert any(PLAIN.reveal() in text for text in [*texts, also])
    else:
        assert result.reason in {"KEY_MISSING", "KEY_INVALID", "KEY_AMBIGUOUS", "TENANT_NOT_YOURS", "INVALID_ARGUMENT"}
        assert PLAIN.secret not in str(result) or "x-tenant-id" in dict(headers)


def test_each_outcome_has_a_label(keys: Keys) -> None:
    results = (keys.authenticate(sent(PLAIN)), Caller(), Caller("acme", "jwt:me"), refusals.key_missing())
    assert [outcome_of(result) for result in results] == ["key", "anonymous", "token", "key_missing"]


def test_a_secret_is_in_no_text(keys: Keys, held: HeldKeys, caplog: pytest.LogCaptureFixture) -> None:
    """Neither what is returned nor what is raised has it, with all frames as they are printed."""
    caplog.set_level(logging.DEBUG)
    texts = [repr(keys.authenticate(sent(PLAIN))), repr(held.snapshot), repr(keys), repr(sent(PLAIN)), repr(RECORDS)]
    for key in (WRONG, UNKNOWN, DEAD):
        with pytest.raises(RyzansteinError) as error:
            keys.authenticate(sent(key))
        texts += [repr(error.value), str(error.value), "".join(traceback.format_exception(error.value))]
    texts += [caplog.text, repr(pickle.dumps(dict(held.snapshot.keys)))]
    for key in (PLAIN, WRONG, UNKNOWN, DEAD):
        assert [text for text in texts if key.secret in text] == []
    assert PLAIN.digest() not in "".join(texts[:5])
