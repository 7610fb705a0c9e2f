from ryzanstein.rpc.debugging import without_secrets


def test_secrets_are_replaced_wherever_they_stand() -> None:
    settings = {
        "redis_url": "redis://user:hunter2@host:6379/1",
        "engine": ["http://key:hunter2@127.0.0.1:8001", "own"],
        "tuning": {"client_secret": "hunter2", "max_tokens": 3, "token": ""},
        "host": "a@b",
    }
    shown = without_secrets(settings)
    assert "hunter2" not in str(shown)
    assert shown["redis_url"] == "redis://**********@host:6379/1"
    assert shown["tuning"] == {"client_secret": "**********", "max_tokens": 3, "token": ""}
    assert (shown["host"], shown["engine"][1]) == ("a@b", "own")
