"""Addresses of inference servers."""

import pytest

from ryzanstein.worker.engines.remote.http.address import EngineAddress


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://gpu-1:8000", "http://gpu-1:8000/health"),
        ("http://gpu-1:8000/", "http://gpu-1:8000/health"),
        ("http://gpu-1", "http://gpu-1:80/health"),
        ("https://engine.example", "https://engine.example:443/health"),
        ("https://engine.example:8443/team/a_b", "https://engine.example:8443/team/a_b/health"),
        ("http://[::1]:8000", "http://[::1]:8000/health"),
        ("http://10.0.0.7:8000/v1.5/", "http://10.0.0.7:8000/v1.5/health"),
        ("unix:///run/engine.sock", "http://localhost/health"),
    ],
)
def test_an_address_makes_urls(text: str, url: str) -> None:
    address = EngineAddress.parse(text)
    assert address.url("/health") == url
    assert address.is_tls == text.startswith("https")
    assert address.socket == ("/run/engine.sock" if text.startswith("unix") else "")


@pytest.mark.parametrize("text", ["unix:///run/engine.sock", "http://gpu-1:8000", "https://[::1]:8443/base"])
def test_an_address_is_shown_as_it_was_written(text: str) -> None:
    assert str(EngineAddress.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu-1:8000", "must be http"),
        ("ftp://gpu-1", "must be http"),
        ("http://", "the host"),
        ("http://:8000", "the host"),
        ("http://[::1", "must be http"),
        ("http://gpu 1:8000", "spaces"),
        ("http://gpu\n1:8000", "spaces"),
        ("http://gpü:8000", "ASCII"),
        ("http://gpu-1:0", "port"),
        ("http://gpu-1:65536", "port"),
        ("http://gpu-1:x", "port"),
        ("http://gpu-1:", "port"),
        ("http://user:secret@gpu-1:8000", "user"),
        ("http://gpu-1:8000?key=secret", "query"),
        ("http://gpu-1:8000?", "query"),
        ("http://gpu-1:8000#x", "fragment"),
        ("http://gpu-1:8000/a/../b", "plain path"),
        ("http://gpu-1:8000/a%2fb", "plain path"),
        ("http://gpu-1:8000//b", "plain path"),
        ("unix://run/engine.sock", "absolute"),
        ("unix:", "absolute"),
        ("unix:///" + "x" * 107, "107 bytes"),
    ],
)
def test_what_is_no_address_is_refused_with_the_name_of_the_setting(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        EngineAddress.parse(text)
    assert str(refused.value).startswith("engine: ")
    assert "secret" not in str(refused.value)
