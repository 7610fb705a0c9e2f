"""Whatever an operator puts together, with a namespace of its own or not, is in one namespace and refers to nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Document = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2] / "k8s"
# What an overlay changes within a workload has nothing to do with its namespace: one overlay stands for all.
BASES = ("base", "overlays/local-cpu")
COMPONENTS = tuple(each.name for each in sorted((ROOT / "components").iterdir()))
# One kind of certificates at a time.
CHOICES = ((), *((name,) for name in COMPONENTS), tuple(name for name in COMPONENTS if name != "tls-secrets"))
NAMED = "app.kubernetes.io/name"


@pytest.fixture(
    scope="module",
    params=[
        (base, chosen, ours, below) for base in BASES for chosen in CHOICES for ours in ("", "own") for below in ("", "low")
    ],
    ids=lambda each: f"{each[0]}+{'+'.join(each[1]) or 'none'}-{each[2] or 'default'}-on-{each[3] or 'default'}",
)
def variant(request: pytest.FixtureRequest, overlay: Callable[..., list[Document]]) -> tuple[str, list[Document]]:
    """The namespace that has to come out, and the documents."""
    base, chosen, own, below = request.param
    return own or below or "ryzanstein", overlay(base, *chosen, namespace=own, below=below)


@pytest.mark.long
def test_every_document_is_in_the_one_namespace_that_is_made(variant: tuple[str, list[Document]]) -> None:
    namespace, documents = variant
    made = [each["metadata"]["name"] for each in documents if each["kind"] == "Namespace"]
    assert made == [namespace]
    elsewhere = {
        f"{each['kind']} {each['metadata']['name']}": each["metadata"].get("namespace")
        for each in documents
        if each["kind"] != "Namespace" and each["metadata"].get("namespace") != namespace
    }
    assert elsewhere == {}


def test_every_reference_finds_what_it_names(variant: tuple[str, list[Document]]) -> None:
    _, documents = variant
    names = {(each["kind"], each["metadata"]["name"]) for each in documents}
    missing = [reference for each in documents for reference in references(each) if reference not in names]
    assert missing == []


def test_every_selector_picks_pods_that_there_are(variant: tuple[str, list[Document]]) -> None:
    """Redis is the operator's; kube-dns and the monitoring are chosen by their own namespaces."""
    _, documents = variant
    pods = {each["spec"]["template"]["metadata"]["labels"][NAMED] for each in documents if "template" in each.get("spec", {})}
    selected = {name for each in documents for name in selected_names(each.get("spec", {}))}
    assert selected - {"redis"} == pods


def references(document: Document) -> Iterator[tuple[str, str]]:
    """Kind and name of what a document needs in its own namespace."""
    spec = document.get("spec", {})
    if "scaleTargetRef" in spec:
        yield spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]
    if "serviceName" in spec:
        yield "Service", spec["serviceName"]
    if "template" in spec:
        yield "ServiceAccount", spec["template"]["spec"]["serviceAccountName"]
    for subject in document.get("subjects", []):
        yield subject["kind"], subject["name"]


def selected_names(value: Any) -> Iterator[str]:
    """Names of our services wherever something is selected by them."""
    if isinstance(value, list):
        for each in value:
            yield from selected_names(each)
    elif isinstance(value, dict):
        if isinstance(value.get(NAMED), str):
            yield value[NAMED]
        if value.get("key") == NAMED:
            yield from value["values"]
        for each in value.values():
            yield from selected_names(each)
