"""Tokens of an OpenID provider, which is a real HTTP server: what is accepted, attacks, and a provider on bad days."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.auth.caller import DEFAULT_SCOPES, Scope
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_text import key_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.router.access.oidc import issuer as issuers
from ryzanstein.router.access.oidc import provider as providers
from ryzanstein.router.access.oidc import tokens as module
from ryzanstein.router.access.oidc.urls import is_secure
from ryzanstein.router.config import RouterSettings

Open = Callable[..., Awaitable[Any]]
Until = Callable[..., Awaitable[None]]
AUDIENCE = "ryzanstein"
PRIVATE: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
OTHER = rsa.generate_private_key(65537, 2048)


def jwk(algorithm: str, private: Any = None, **more: Any) -> dict[str, Any]:
    """The public key as the provider publishes it; its id is the algorithm's name."""
    key = (private or PRIVATE[algorithm]).public_key()
    made = jwt.get_algorithm_by_name(algorithm).to_jwk(key, as_dict=True)
    return {**made, "kid": algorithm, "use": "sig", **more}


class Provider(BaseHTTPRequestHandler):
    """Its switches are attributes of its server."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.paths.append(self.path)
        if self.path == "/.well-known/openid-configuration":
            server.discovered(self)
        elif self.path == "/keys":
            server.answer(self)
        else:
            self.send_error(404)

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def provider() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    server.daemon_threads = True
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.paths = []
    server.keys = [jwk(algorithm) for algorithm in PRIVATE]
    server.document = {"issuer": server.url, "jwks_uri": f"{server.url}/keys"}
    server.discovered = lambda handler: handler.send(json.dumps(server.document).encode())
    server.publish = lambda handler: handler.send(json.dumps({"keys": server.keys}).encode())
    server.answer = server.publish
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def open_tokens(open_access: Open, provider: Any) -> Open:
    async def open_tokens(**settings: Any) -> Any:
        return await open_access(oidc_issuer=provider.url, oidc_audience=AUDIENCE, **settings)

    return open_tokens


def claims(provider: Any, **more: Any) -> dict[str, Any]:
    now = int(time.time())
    made = {"iss": provider.url, "aud": AUDIENCE, "sub": "ada", "tenant": "acme", "iat": now, "exp": now + 300, **more}
    return {name: value for name, value in made.items() if value is not None}


def token(provider: Any, algorithm: str = "ES256", headers: Any = None, private: Any = None, **more: Any) -> str:
    headers = {name: value for name, value in {"kid": algorithm, **(headers or {})}.items() if value is not None}
    return jwt.encode(claims(provider, **more), private or PRIVATE[algorithm], algorithm, headers)


def by_hand(header: dict[str, Any], payload: dict[str, Any], sign: Callable[[bytes], bytes] = lambda _: b"") -> str:
    def encoded(data: bytes) -> bytes:
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    signed = encoded(json.dumps(header).encode()) + b"." + encoded(json.dumps(payload).encode())
    return (signed + b"." + encoded(sign(signed))).decode()


@pytest.mark.parametrize("algorithm", PRIVATE)
async def test_a_token_names_its_caller(open_tokens: Open, provider: Any, algorithm: str) -> None:
    access = await open_tokens()
    made = token(provider, algorithm)
    caller = access.caller(made)
    assert (caller.tenant, caller.key_id, caller.scopes, caller.models) == ("acme", "jwt:ada", DEFAULT_SCOPES, None)
    assert (caller.cache_scope, caller.ends) == ("acme", claims(provider)["exp"] + 60)
    assert (access.outcome(made), access.ended(caller)) == ("token", "")
    assert access.outcome("") == "key_missing"


async def test_a_provider_on_this_machine_is_asked_without_a_proxy(
    open_tokens: Open, provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    access = await open_tokens()
    assert access.outcome(token(provider)) == "token"


@pytest.mark.parametrize(
    ("given", "scopes"),
    [
        ({"scope": "openid ryzanstein:infer status"}, {"infer", "status"}),
        ({"scp": ["ryzanstein:act_as", 3]}, {"act_as"}),
        ({"scope": "openid email"}, set(DEFAULT_SCOPES)),
        ({"scope": 3}, set(DEFAULT_SCOPES)),
    ],
)
async def test_scopes_of_ours_are_taken(open_tokens: Open, provider: Any, given: Any, scopes: set[str]) -> None:
    access = await open_tokens()
    assert access.caller(token(provider, **given)).scopes == {Scope(each) for each in scopes}


async def test_only_a_token_that_may_act_for_others_names_a_tenant(open_tokens: Open, provider: Any) -> None:
    access = await open_tokens()
    gateway = token(provider, scope="act_as infer")
    assert access.caller(gateway, "globex").tenant == "globex"
    plain = token(provider)
    assert access.caller(plain, "acme").tenant == "acme"
    with pytest.raises(Exception, match="names another tenant"):
        access.caller(plain, "globex")


async def test_the_claim_of_the_tenant_is_chosen(open_tokens: Open, provider: Any) -> None:
    access = await open_tokens(oidc_tenant_claim="https://example/org")
    assert access.caller(token(provider, **{"https://example/org": "globex"})).tenant == "globex"
    for wrong in (None, "", "a b", "*", 3, ["globex"], "a" * 129):
        assert access.outcome(token(provider, **{"https://example/org": wrong})) == "key_invalid"


async def test_keys_and_tokens_are_told_apart_by_their_shape(open_tokens: Open, provider: Any, tmp_path: Path) -> None:
    key = ApiKey.new()
    place = tmp_path / "keys.toml"
    write(place, f"[tenant.acme]\npriority = 2\ncache = 'group:g'\n{key_text(record(key))}")
    access = await open_tokens(keys_file=place)
    assert access.outcome(key.reveal()) == "key"
    caller = access.caller(token(provider))
    assert (caller.max_priority, caller.cache_scope) == (2, "group:g")
    assert access.ended(caller) == access.ended(access.caller(key.reveal())) == ""
    # A key with dots in it is no key, and no token either.
    assert [access.outcome(each) for each in (key.reveal() + "..", "a.b", "a.b.c.d", "..")] == ["key_invalid"] * 4
    alone = await open_tokens()
    assert alone.outcome(key.reveal()) == "key_invalid"


def record(key: ApiKey) -> KeyRecord:
    return KeyRecord(key.key_id, key.digest(), "acme", DEFAULT_SCOPES)


def write(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


def forged(provider: Any) -> dict[str, str]:
    """Attacks by name."""
    good, payload = token(provider, "RS256"), claims(provider)
    head, body, signature = good.split(".")
    public = PRIVATE["RS256"].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.PKCS1)
    text = json.dumps(jwk("RS256")).encode()
    return {
        "alg none": by_hand({"alg": "none", "kid": "RS256"}, payload),
        "alg None": by_hand({"alg": "None", "kid": "RS256"}, payload),
        "no alg": by_hand({"kid": "RS256"}, payload),
        **{
            f"HS256 with the public key {number}": by_hand(
                {"alg": "HS256", "kid": "RS256"}, payload, lambda data, key=key: hmac.digest(key, data, "sha256")
            )
            for number, key in enumerate((pem, pem.strip(), der, text))
        },
        "signed by another": token(provider, "RS256", private=OTHER),
        "its own key in the header": token(provider, "RS256", {"jwk": jwk("RS256", OTHER)}, OTHER),
        "a key's address in the header": token(provider, "RS256", {"jku": "http://127.0.0.1:1/"}, OTHER),
        "another algorithm of the key": token(provider, "RS512", {"kid": "RS256"}, PRIVATE["RS256"]),
        "a key of another type": token(provider, "ES256", {"kid": "RS256"}),
        "no kid": token(provider, headers={"kid": None}),
        "a critical header": token(provider, headers={"crit": ["exp"], "exp": 1}),
        "other claims": f"{head}.{by_hand({}, payload | {'tenant': 'x'}).split('.')[1]}.{signature}",
        "no signature": f"{head}.{body}.",
        "wrong audience": token(provider, aud="another"),
        "no audience": token(provider, aud=None),
        "wrong issuer": token(provider, iss=provider.url + "/"),
        "no issuer": token(provider, iss=None),
        "no subject": token(provider, sub=None),
        "no end": token(provider, exp=None),
        "endless": by_hand({"alg": "RS256", "kid": "RS256"}, payload | {"exp": float("inf")}),
        "not yet": token(provider, nbf=int(time.time()) + 120),
        "issued later": token(provider, iat=int(time.time()) + 120),
        "nested": base64.urlsafe_b64encode(b"[" * 6000).decode().rstrip("=") + ".a.b",
        "NUL": f"{head}\0.{body}.{signature}",
    }


async def test_no_forged_token_is_accepted(open_tokens: Open, provider: Any) -> None:
    access = await open_tokens()
    outcomes = {name: access.outcome(made) for name, made in forged(provider).items()}
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "key_invalid"} == {}
    assert access.outcome(token(provider, "RS256")) == "token"


async def test_a_token_that_is_over_has_expired(open_tokens: Open, provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    access = await open_tokens()
    now = time.time()
    assert access.outcome(token(provider, exp=int(now) - 55)) == "token"  # within the leeway
    assert access.outcome(token(provider, exp=int(now) - 61)) == "key_expired"
    made = token(provider, exp=int(now) + 5)
    caller = access.caller(made)
    monkeypatch.setattr(access.opened.authenticator._tokens, "_clock", lambda: now + 66)
    assert (access.ended(caller), access.outcome(made)) == ("KEY_EXPIRED", "key_expired")


async def test_a_token_is_verified_once(open_tokens: Open, provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    access = await open_tokens()
    verified = []
    original = jwt.decode
    monkeypatch.setattr(module.jwt, "decode", lambda *a, **k: verified.append(1) or original(*a, **k))
    made = [token(provider, sub=f"user-{number}") for number in range(4)]
    for each in made * 5:
        assert access.outcome(each) == "token"
    assert len(verified) == 4
    monkeypatch.setattr(module, "MAX_REMEMBERED", 4)
    assert access.outcome(token(provider, sub="one more")) == "token"
    assert len(access.opened.authenticator._tokens._remembered) == 4
    assert access.outcome(made[-1]) == "token"
    assert len(verified) == 5
    assert access.outcome(made[0]) == "token"
    assert len(verified) == 6


async def test_ten_thousand_unknown_ids_fetch_the_keys_once(open_tokens: Open, provider: Any, until: Until) -> None:
    """The time between fetches is real: the first was just now, so the next is not before 30 s."""
    access = await open_tokens()
    payload, signed = claims(provider), PRIVATE["ES256"]
    head, _, rest = jwt.encode(payload, signed, "ES256", {"kid": "ES256"}).partition(".")
    longest = 0.0
    for number in range(10_000):
        headed = base64.urlsafe_b64encode(json.dumps({"alg": "ES256", "kid": f"k{number}"}).encode()).decode().rstrip("=")
        began = time.perf_counter()
        assert access.outcome(f"{headed}.{rest}") == "key_invalid"
        longest = max(longest, time.perf_counter() - began)
        if number % 1000 == 0:
            await asyncio.sleep(0.01)
    assert provider.paths.count("/keys") == 1
    assert longest < 0.05
    assert access.outcome(f"{head}.{rest}") == "token"


async def test_a_new_key_of_the_issuer_is_fetched_for_its_first_token(
    open_tokens: Open, provider: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuers, "LEAST_BETWEEN_S", 0.05)
    provider.keys = [jwk("ES256")]
    access = await open_tokens()
    old, new = token(provider), token(provider, "EdDSA")
    assert [access.outcome(each) for each in (old, new)] == ["token", "key_invalid"]
    # The issuer turns its keys: the old one is gone, and with it what it signed.
    provider.keys = [jwk("EdDSA")]
    access.outcome(new)
    await until(lambda: access.outcome(new) == "token")
    assert access.outcome(old) == "key_invalid"
    # Another key under the same id ends what the former one signed.
    provider.keys = [jwk("EdDSA", ed25519.Ed25519PrivateKey.generate())]
    access.outcome(old)
    await until(lambda: access.outcome(new) == "key_invalid")
    assert provider.paths.count("/.well-known/openid-configuration") == 1


def drip(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.05)


BAD_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "500": lambda handler: handler.send_error(500),
    "silence": lambda handler: time.sleep(1.0),
    "drops": drip,
    "no JSON": lambda handler: handler.send(b"<html>"),
    "no HTTP": lambda handler: handler.wfile.write(b"\0\0\0\n\n"),
    "no object": lambda handler: handler.send(b"[]"),
    "no keys": lambda handler: handler.send(b'{"keys": []}'),
    "huge": lambda handler: handler.send(b" " * (2**20 + 1)),
    "many": lambda handler: handler.send(json.dumps({"keys": [{}] * 101}).encode()),
    "elsewhere": lambda handler: handler.send(b"", 302, Location="http://example.com/keys"),
    "a file": lambda handler: handler.send(b"", 302, Location="file:///etc/passwd"),
    "secret keys": lambda handler: handler.send(
        json.dumps(
            {
                "keys": [
                    {"kty": "oct", "kid": "ES256", "k": "c2VjcmV0", "alg": "HS256"},
                    {**jwk("ES256"), "d": "AAAA"},
                    jwk("ES256", use="enc"),
                    jwk("RS256", rsa.generate_private_key(65537, 1024)),
                    {**jwk("ES256"), "alg": "HS256"},
                    {**jwk("ES256"), "crv": "P-384"},
                    {**jwk("ES256"), "x": "AAAA"},
                    {**jwk("ES256"), "kid": 3},
                    {"kty": []},
                    "key",
                ]
            }
        ).encode()
    ),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_provider_on_a_bad_day_holds_nobody_up(
    open_tokens: Open, provider: Any, *, name: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last keys stay, the loop goes on, and the router that starts meanwhile says that keys are unavailable."""
    monkeypatch.setattr(providers, "_WAIT_S", 0.3)
    monkeypatch.setattr(providers, "_WHOLE_S", 0.5)
    monkeypatch.setattr(issuers, "LEAST_BETWEEN_S", 0.05)
    access = await open_tokens()
    made = token(provider)
    assert access.outcome(made) == "token"
    provider.answer = BAD_ANSWERS[name]
    access.outcome(token(provider, headers={"kid": "new"}))
    late = 0.0
    while access.value("keys_reloads_total", source="oidc", outcome="failed") < 1:
        before = time.perf_counter()
        await asyncio.sleep(0.002)
        late = max(late, time.perf_counter() - before)
    assert late < 0.1
    assert access.outcome(made) == "token"
    started = await open_tokens()
    assert started.outcome(made) == "keys_unavailable"
    provider.answer = provider.publish
    await until(lambda: started.outcome(made) == "token")


async def test_a_silent_provider_holds_up_no_start(
    open_tokens: Open, provider: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuers, "START_S", 0.1)
    monkeypatch.setattr(issuers, "LEAST_BETWEEN_S", 0.1)
    speaks = threading.Event()
    provider.answer = lambda handler: (speaks.wait(5), provider.publish(handler))
    before = time.monotonic()
    access = await open_tokens()
    assert time.monotonic() - before < 2
    assert access.outcome(token(provider)) == "keys_unavailable"
    speaks.set()
    await until(lambda: access.outcome(token(provider)) == "token")


@pytest.mark.parametrize("changed", [{"issuer": "http://127.0.0.1:1"}, {"jwks_uri": "http://example.com/"}, {"jwks_uri": 3}])
async def test_a_document_of_another_issuer_is_refused(open_tokens: Open, provider: Any, changed: Any) -> None:
    provider.document |= changed
    access = await open_tokens()
    assert access.outcome(token(provider)) == "keys_unavailable"
    assert "/keys" not in provider.paths


async def test_the_last_keys_are_trusted_for_a_day(open_tokens: Open, provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    access = await open_tokens()
    made = token(provider)
    issuer = access.opened.authenticator._tokens._issuer
    for hours, outcome in ((23.9, "token"), (24.1, "keys_unavailable")):
        monkeypatch.setattr(issuer, "_clock", lambda hours=hours: time.monotonic() + hours * 3600)
        assert access.outcome(made) == outcome


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)), st.text(), st.binary())
def test_no_three_parts_are_more_than_an_invalid_key(one: str, two: str, three: bytes) -> None:
    class Issuer:
        keys: dict[str, Any] = {}  # noqa: RUF012
        are_trusted = True

        def want(self) -> None:
            pass

    tokens = module.Tokens(module.TokenTerms("i", "a", "t"), Issuer(), lambda _: None)  # type: ignore[arg-type,return-value]
    header = base64.urlsafe_b64encode(json.dumps({"alg": one, "kid": two}).encode()).decode()
    for text in (f"{one}.{two}.", f"{header}.{one}.{base64.urlsafe_b64encode(three).decode()}"):
        with pytest.raises(Exception, match="the API key is not valid") as error:
            tokens.authenticate(module.Credential(text))
        assert type(error.value).__name__ == "RyzansteinError"


async def test_a_token_is_in_no_log_or_error(open_tokens: Open, provider: Any, capfd: pytest.CaptureFixture[str]) -> None:
    access = await open_tokens()
    made = token(provider)
    bad = made[:-4] + "AAAA"
    assert (access.outcome(made), access.outcome(bad)) == ("token", "key_invalid")
    with pytest.raises(Exception, match="not valid") as error:
        access.caller(bad)
    seen = "".join(capfd.readouterr()) + repr(error.value) + repr(error.value.__cause__) + repr(access.caller(made))
    assert "token refused" in seen
    for part in (made.split(".")[2], bad.split(".")[1], hashlib.sha256(made.encode()).hexdigest()):
        assert part not in seen


@pytest.mark.parametrize(
    "url", ["http://example.com", "ftp://example.com", "https://", "example.com", "https://[", "file:///a"]
)
def test_an_issuer_is_reached_over_tls(url: str) -> None:
    assert not is_secure(url)
    with pytest.raises(ValueError, match="must be an https:// address"):
        RouterSettings(oidc_issuer=url, oidc_audience="a")


def test_an_issuer_needs_an_audience() -> None:
    with pytest.raises(ValueError, match="oidc_issuer requires oidc_audience"):
        RouterSettings(oidc_issuer="https://example.com")
