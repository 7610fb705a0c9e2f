"""Who gets in, and from where: names, origins, links, keys, and the headers of every response."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.public_certificates import PublicAuthority
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from ryzanstein.console.answers.restarts import RestartNotes
from ryzanstein.console.app import HEADERS, MOST_BODY_BYTES, POLICY
from ryzanstein.console.config import ConsoleSettings
from ryzanstein.console.login import MOST_TOKENS, TOKEN_S, Logins, PagePlaces
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.scripted_router import Script, ScriptedRouter

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@pytest.fixture
def console(shared_console: ConsoleProcess, router: ScriptedRouter) -> ConsoleProcess:
    return shared_console


class Answer:
    def __init__(self, console: ConsoleProcess, method: str, path: str, body: object = None, **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", console.port, timeout=20)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        connection.request(method, path, content, {"Origin": f"http://127.0.0.1:{console.port}", **given})
        response = connection.getresponse()
        self.status, self.headers, self.body = response.status, response.headers, response.read().decode()
        connection.close()

    @property
    def cookie(self) -> str:
        return str(self.headers["set-cookie"]).partition(";")[0]


def token_of(link: str) -> dict[str, str]:
    return {"token": link.partition("#t=")[2]}


def logged_in(console: ConsoleProcess) -> str:
    """A cookie."""
    return Answer(console, "POST", "/login", token_of(console.another_link())).cookie


def test_a_link_logs_in_once_and_its_cookie_is_for_this_page_alone(console: ConsoleProcess) -> None:
    assert console.link.startswith("http://127.0.0.1:")
    first = Answer(console, "POST", "/login", token_of(console.link))
    assert first.status == 204
    kept = str(first.headers["set-cookie"]).lower()
    assert "httponly" in kept
    assert "samesite=strict" in kept
    again = Answer(console, "POST", "/login", token_of(console.link))
    assert (again.status, again.headers["set-cookie"]) == (401, None)
    assert json.loads(Answer(console, "GET", "/me", Cookie=first.cookie).body) == {"login": "link", "entered": True}
    assert json.loads(Answer(console, "GET", "/me").body) == {"login": "link", "entered": False}
    assert Answer(console, "POST", "/logout", Cookie=first.cookie).status == 204
    assert json.loads(Answer(console, "GET", "/me", Cookie=first.cookie).body)["entered"] is False
    assert token_of(console.link)["token"] not in console.log.read_text()


@pytest.mark.parametrize(
    "body", [{}, {"token": ""}, {"token": "x"}, {"key": "sk"}, {"other": 1}, b"[", b"x" * (MOST_BODY_BYTES + 1)]
)
def test_what_is_no_token_does_not_log_in(console: ConsoleProcess, body: object) -> None:
    assert Answer(console, "POST", "/login", body).status in (400, 401)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1.evil.example:{port}",
        "",
        "a@127.0.0.1:{port}",
    ],
)
def test_another_name_is_refused_whatever_it_asks_for(console: ConsoleProcess, host: str) -> None:
    for method, path in (("GET", "/"), ("GET", "/static/main.js"), ("POST", "/login")):
        assert Answer(console, method, path, Host=host.format(port=console.port)).status == 403


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_this_machines_names_are_known(console: ConsoleProcess, name: str) -> None:
    assert Answer(console, "GET", "/", Host=f"{name}:{console.port}").status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1", "http://127.0.0.1:{port}/x"]
)
def test_another_page_cannot_act(console: ConsoleProcess, origin: str) -> None:
    cookie = logged_in(console)
    origin = origin.format(port=console.port)
    assert Answer(console, "POST", "/logout", Origin=origin, Cookie=cookie).status == 403
    with (
        pytest.raises(InvalidStatus) as refusal,
        connect(socket_url(console), origin=origin, additional_headers={"Cookie": cookie}),
    ):
        pass
    assert refusal.value.response.status_code == 403
    assert json.loads(Answer(console, "GET", "/me", Cookie=cookie).body)["entered"] is True


def socket_url(console: ConsoleProcess) -> str:
    return f"ws://127.0.0.1:{console.port}/socket"


def test_a_socket_without_a_login_is_closed(console: ConsoleProcess) -> None:
    with connect(socket_url(console), origin=f"http://127.0.0.1:{console.port}") as socket:
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=10)
        assert socket.close_code == 4401


@pytest.mark.parametrize(
    ("method", "path", "status", "cached"),
    [
        ("GET", "/", 200, "no-cache"),
        ("GET", "/static/main.js", 200, "no-cache"),
        ("GET", "/static/..%2Fapp.py", 404, "no-store"),
        ("GET", "/static/%2e%2e/app.py", 404, "no-store"),
        ("GET", "/nothing", 404, "no-store"),
        ("POST", "/login", 400, "no-store"),
        ("PUT", "/login", 405, "no-store"),
        ("GET", "/me", 200, "no-store"),
    ],
)
def test_every_response_has_the_policy(console: ConsoleProcess, method: str, path: str, status: int, cached: str) -> None:
    answer = Answer(console, method, path)
    assert answer.status == status
    policy = answer.headers["content-security-policy"]
    styles = re.findall(r"<style>(.*)</style>", answer.body, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in styles]
    assert len(styles) == int(path == "/")
    assert policy == (CSP if not styles else CSP.replace("style-src 'self'", f"style-src 'sha256-{digests[0]}'"))
    assert POLICY == CSP
    assert {name: answer.headers[name] for name in HEADERS} == {**HEADERS, "Content-Security-Policy": policy}
    assert (answer.headers["cache-control"], answer.headers["server"]) == (cached, None)


def test_a_file_that_has_not_changed_is_not_sent_again(console: ConsoleProcess) -> None:
    first = Answer(console, "GET", "/static/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = Answer(console, "GET", "/static/main.js", If_None_Match=first.headers["etag"])
    assert (again.status, again.body) == (304, "")


def test_each_person_enters_a_key_behind_a_proxy_and_it_is_checked_by_the_cluster(
    router: ScriptedRouter, script: Script, start_console: Callable[..., ConsoleProcess]
) -> None:
    console = start_console(router.address, "--behind-proxy", "--public-url", "https://console.example/chat")
    asked = {"Host": "console.example", "Origin": "https://console.example"}
    assert console.link == "https://console.example/chat/"
    console.port = int(json.loads(next(line for line in console.log.read_text().splitlines() if "serving" in line))["port"])
    assert (
        Answer(console, "POST", "/login", {"key": "sk-one"}, Host="console.example", Origin="http://console.example").status
        == 403
    )
    assert Answer(console, "POST", "/login", {"key": "wrong"}, **asked).status == 401
    assert Answer(console, "POST", "/login", {"key": "spaces are none"}, **asked).status == 400
    entered = Answer(console, "POST", "/login", {"key": "sk-one"}, **asked)
    assert entered.status == 204
    assert "secure" in str(entered.headers["set-cookie"]).lower()
    assert script.keys == ["Bearer wrong", "Bearer sk-one"]
    assert "sk-one" not in str(entered.headers) + console.log.read_text()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--host", "0.0.0.0"], "--tls-cert"),
        (["--host", "10.0.0.1"], "--behind-proxy"),
        (["--host", "0.0.0.0", "--insecure"], "--tls-cert"),
        (["--behind-proxy"], "--public-url"),
        (["--tls-cert", "a.pem"], "--tls-key"),
        (["--host", "0.0.0.0", "--tls-cert", "a", "--tls-key", "b"], "--public-url"),
        (["--public-url", "ftp://x"], "public_url"),
        (["--public-url", "https://x/?q"], "public_url"),
        (["--port", "70000"], "port"),
        (["--router", "nowhere"], "router"),
    ],
)
def test_it_does_not_start_where_strangers_could_read_along(flags: list[str], named: str) -> None:
    command = [sys.executable, "-P", "-m", "ryzanstein.console", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, named in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_file_of_a_key_is_named_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("two keys\nin one file")
    command = [sys.executable, "-P", "-m", "ryzanstein.console", "--port", "0", "--key-file", str(tmp_path / "key")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "key_file" in done.stderr
    assert "two keys" not in done.stderr


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakePerson:
    class hub:
        running = 0

        @staticmethod
        def resume() -> None:
            pass


def logins(clock: Clock) -> Logins:
    return Logins(3600.0, ConsoleTelemetry(), clock)


def test_logins_outlive_a_restart_but_not_their_idle_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = RestartNotes(tmp_path)
    first = Logins(3600.0, ConsoleTelemetry(), notes=notes)
    cookie, out = (first.enter("", FakePerson) for _ in range(2))  # type: ignore[arg-type]
    first.leave(out)
    assert cookie not in (tmp_path / "logins.json").read_text(), "digests alone"
    for later_s, entered in ((0.0, True), (3500.0, True), (3700.0, False)):
        now = time.time() + later_s
        monkeypatch.setattr(time, "time", lambda now=now: now)
        second = Logins(3600.0, ConsoleTelemetry(), notes=notes)
        second.restore(FakePerson())  # type: ignore[arg-type]
        assert second.person(out) is None
        assert (second.person(cookie) is not None) is entered
        monkeypatch.undo()


def test_a_token_is_good_once_and_for_ten_minutes() -> None:
    clock = Clock()
    made = logins(clock)
    token, late = made.new_token(), made.new_token()
    assert (made.take_token(token), made.take_token(token)) == (True, False)
    clock.now += TOKEN_S
    assert not made.take_token(late)
    assert not made.take_token("")


def test_of_many_links_the_oldest_are_void() -> None:
    made = logins(Clock())
    tokens = [made.new_token() for _ in range(MOST_TOKENS + 1)]
    assert [made.take_token(token) for token in (tokens[0], tokens[1])] == [False, True]


def test_who_does_nothing_is_logged_out() -> None:
    clock = Clock()
    made = logins(clock)
    person: Any = FakePerson()
    cookie = made.enter("key", lambda: person)
    other = made.enter("key", lambda: pytest.fail("made twice"))
    clock.now += 3000
    assert made.person(cookie) is person
    clock.now += 3000
    assert (made.person(cookie), made.person("x"), made.person(None)) == (person, None, None)
    assert made.idle() == []
    clock.now += 3601
    assert made.person(cookie) is None
    assert made.idle() == [person]
    assert made.people == []
    assert made.person(other) is None


def test_the_cookies_and_tokens_themselves_are_not_kept() -> None:
    made = logins(Clock())
    token = made.new_token()
    cookie = made.enter("sk-secret", FakePerson)  # type: ignore[arg-type]
    kept = repr(vars(made))
    assert not any(secret in kept for secret in (token, cookie, "sk-secret"))


def test_names_are_compared_in_one_spelling() -> None:
    places = PagePlaces.of(["https://Console.Example/", "http://127.0.0.1:8765"])
    assert places.knows_host("Console.example")
    assert places.knows_host("console.example:443")
    assert not places.knows_host("console.example:80")
    assert places.knows_origin("https://console.example")
    assert not places.knows_origin("http://console.example")
    assert not places.knows_origin(None)
    assert not places.knows_host("[")


def test_the_addresses_of_a_page() -> None:
    assert ConsoleSettings().urls(1)[0] == "http://127.0.0.1:1"
    assert ConsoleSettings(behind_proxy=True, public_url="https://a.example/x").urls(1)[0] == "https://a.example"
    assert ConsoleSettings(host="::1").urls(1) == ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"]


def test_with_a_certificate_the_page_speaks_tls_and_its_cookie_is_for_tls_alone(
    router: ScriptedRouter, start_console: Callable[..., ConsoleProcess], tmp_path: Path
) -> None:
    files = PublicAuthority().write(tmp_path)
    console = start_console(router.address, *files.flags)
    assert console.link.startswith("https://127.0.0.1:")
    trust = ssl.create_default_context(cafile=str(files.ca))
    connection = http.client.HTTPSConnection("127.0.0.1", console.port, timeout=20, context=trust)
    headers = {"Origin": console.url.removesuffix("/"), "Content-Type": "application/json"}
    connection.request("POST", "/login", json.dumps(token_of(console.link)), headers)
    response = connection.getresponse()
    assert response.status == 204
    assert "secure" in str(response.headers["set-cookie"]).lower()
    connection.close()


def test_on_this_machine_the_key_of_a_file_goes_to_the_cluster_and_nowhere_else(
    router: ScriptedRouter, script: Script, start_console: Callable[..., ConsoleProcess], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("sk-file\n")
    console = start_console(router.address, "--key-file", str(tmp_path / "key"))
    cookie = logged_in(console)
    headers = {"Cookie": cookie}
    with connect(socket_url(console), origin=console.url[:-1], additional_headers=headers) as socket:  # type: ignore[arg-type]
        socket.send(json.dumps({"t": "models", "call": 1}))
        said = [socket.recv(timeout=20) for _ in range(3)]
    assert script.keys == ["Bearer sk-file"]
    assert "sk-file" not in str(said) + console.log.read_text()
