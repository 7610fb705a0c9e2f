"""Routers on Kubernetes that ask for keys: where these come from, and what protects what has none."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.auth.keys.keys_file import KeysFile, KeysFileError
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.router.config import RouterSettings
from ryzanstein.worker.config import WorkerSettings

Document = dict[str, Any]
SETTINGS = {"router": RouterSettings, "orchestrator": OrchestratorSettings, "worker": WorkerSettings}
VARIABLE = "RYZANSTEIN_"


def pods(manifests: list[Document]) -> dict[str, Document]:
    """The specification of each workload's pods, by its name."""
    workloads = [each for each in manifests if each["kind"] in {"Deployment", "StatefulSet"}]
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in workloads}


def settings_of(manifests: list[Document], name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A service's settings as its container gives them."""
    (container,) = pods(manifests)[name]["containers"]
    for variable in [each for each in os.environ if each.startswith(VARIABLE)]:
        monkeypatch.delenv(variable)
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each.get("value", f"{name}-0"))
    return SETTINGS[name](_env_file=None)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_what_listens_to_strangers_says_that_the_network_protects_it(
    manifests: list[Document], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(manifests, name, monkeypatch)
    assert (settings.host, settings.insecure) == ("0.0.0.0", True)
    settings.check_exposure()


def test_with_keys_a_router_is_protected_by_nothing_else(with_keys: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(with_keys, "router", monkeypatch)
    assert (settings.auth_mode, settings.insecure, settings.protected) == ("required", False, True)
    settings.check_exposure()
    unprotected = settings.model_copy(update={"keys_file": None})
    with pytest.raises(ValueError, match="everybody who reaches"):
        unprotected.check_exposure()


def test_the_keys_are_a_folder_that_follows_the_secret_and_the_pod_may_not_write(with_keys: list[Document]) -> None:
    router = pods(with_keys)["router"]
    (container,) = router["containers"]
    (file,) = [Path(each["value"]) for each in container["env"] if each["name"] == "RYZANSTEIN_KEYS_FILE"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "access"]
    (volume,) = [each for each in router["volumes"] if each["name"] == "access"]
    assert mount == {"name": "access", "mountPath": str(file.parent), "readOnly": True}, "no subPath: it would not change"
    assert volume["secret"] == {"secretName": "ryzanstein-access", "defaultMode": 0o440}
    assert router["securityContext"]["fsGroup"] == router["securityContext"]["runAsGroup"]
    others = [spec for name, spec in pods(with_keys).items() if name != "router"]
    assert not [each for spec in others for each in spec["volumes"] if "secret" in each], "nobody else needs the keys"


@pytest.mark.parametrize(("mode", "accepted"), [(0o440, True), (0o444, False)])
def test_a_secret_as_kubelet_mounts_it_is_read_and_a_wider_one_is_not(tmp_path: Path, mode: int, accepted: bool) -> None:
    content = tmp_path / f"..{time.time_ns()}"
    content.mkdir()
    (content / "access.toml").write_text("")
    (content / "access.toml").chmod(mode)
    (tmp_path / "..data").symlink_to(content.name)
    (tmp_path / "access.toml").symlink_to("..data/access.toml")
    if accepted:
        assert not KeysFile(tmp_path / "access.toml").read().keys
    else:
        with pytest.raises(KeysFileError, match="0444"):
            KeysFile(tmp_path / "access.toml").read()


def test_no_secret_is_an_argument_or_a_literal(with_everything: list[Document]) -> None:
    names = ("SECRET", "PASSWORD", "TOKEN", "REDIS_URL")
    for spec in pods(with_everything).values():
        for container in spec["containers"]:
            assert not [each for each in container.get("args", []) if "key" in each.lower() or "secret" in each.lower()]
            assert not [each for each in container.get("env", []) if each["name"].endswith(names) and "value" in each]
    assert not [each for each in with_everything if each["kind"] == "Secret"], "the operator's, never the repository's"
