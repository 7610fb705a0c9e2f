"""Loads and rates of the last samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ryzanstein.cli.watch.table import CHART
from ryzanstein.cli.watch.trends import CLUSTER, LoadReading, Trend, Trends, generated_tokens
from ryzanstein.survey.views import ClusterStatus, Distribution, RouterFigures, RouterView


def rates(*samples: tuple[float, int | None]) -> list[float | None]:
    trend = Trend()
    for at, tokens in samples:
        trend.add(LoadReading(0, 0, tokens), at)
    return list(trend.rates)


def test_two_samples_of_a_counter_are_a_rate() -> None:
    assert rates((10.0, 100), (12.0, 150), (13.0, 150)) == [None, 25.0, 0.0]


def test_a_counter_that_begins_again_is_no_rate_and_never_a_negative_one() -> None:
    assert rates((10.0, 100), (11.0, 20), (12.0, 50)) == [None, None, 30.0]


def test_no_time_between_two_samples_and_no_counter_are_no_rate() -> None:
    assert rates((10.0, 100), (10.0, 200)) == [None, None]
    assert rates((10.0, None), (11.0, None)) == [None, None]


def test_a_service_that_was_silent_has_no_rate_of_the_time_meanwhile() -> None:
    trend = Trend()
    trend.add(LoadReading(1, 4, 100), 1.0)
    trend.add(None, 2.0)
    trend.add(LoadReading(1, 4, 400), 3.0)
    trend.add(LoadReading(1, 4, 410), 4.0)
    assert list(trend.rates) == [None, None, None, 10.0]
    assert list(trend.shares) == [0.25, None, 0.25, 0.25]


def test_sixty_values_are_kept(scene: Any) -> None:
    trends = Trends()
    for at in range(100):
        trends.take(scene.cluster(scene.node("node-0", at % 64)), float(at))
    shares = trends.of(("node", "node-0")).shares
    assert len(shares) == CHART == 60
    assert shares[-1] == 35 / 64


def test_models_and_the_cluster_are_the_sums_of_their_nodes(scene: Any) -> None:
    trends = Trends()
    trends.take(scene.cluster(scene.node("a", 16), scene.node("b", 16), scene.node("c", 64, model="other")), 1.0)
    assert trends.of(("model", "demo")).shares[-1] == 0.25
    assert trends.of(("model", "other")).shares[-1] == 1.0
    assert trends.of(CLUSTER).shares[-1] == 0.5


def test_a_silent_node_is_no_load_of_0_and_is_forgotten_in_the_end(scene: Any) -> None:
    trends = Trends()
    trends.take(scene.cluster(scene.node("a", 16)), 1.0)
    trends.take(scene.cluster(scene.node("a", 16, error="gone")), 2.0)
    assert list(trends.of(("node", "a")).shares) == [0.25, None]
    trends.take(scene.cluster(), 1000.0)
    assert list(trends.of(("node", "a")).shares) == []


def test_a_chart_of_rates_is_scaled_to_the_highest() -> None:
    trend = Trend()
    for at, tokens in enumerate((0, 10, 50, 50)):
        trend.add(LoadReading(tokens=tokens), float(at))
    assert trend.busiest == (None, 0.25, 1.0, 0.0)
    assert trend.tokens_per_s == 0.0


def test_a_release_without_figures_counts_no_tokens(scene: Any) -> None:
    assert generated_tokens(scene.node("a")) is None
    assert generated_tokens(RouterView()) is None


def test_tokens_of_nodes_are_added_and_those_of_the_router_stand_in_for_them(scene: Any) -> None:
    counting, router = Trends(), RouterView("router-0", figures=RouterFigures(generated_tokens=1000))
    for at in (0, 1):
        nodes = scene.counting("a", 100 * at), scene.counting("b", 50 * at)
        counting.take(replace(scene.cluster(*nodes), router=router), float(at))
    assert counting.of(CLUSTER).tokens_per_s == 150.0
    assert counting.of(("node", "a")).tokens_per_s == 100.0
    alone = Trends()
    for at in (0, 1):
        router = RouterView("router-0", figures=RouterFigures(generated_tokens=70 * at))
        alone.take(replace(scene.cluster(scene.node("a")), router=router), float(at))
    assert alone.of(CLUSTER).tokens_per_s == 70.0
    assert alone.of(CLUSTER).shares[-1] == 0.0


def test_the_time_to_the_first_token_is_that_of_the_last_samples() -> None:
    trends = Trends()
    assert trends.first_token_s(0.5) is None
    bounds = (0.1, 0.2, 0.4)
    for counts in ((90, 90, 90, 90), (90, 90, 100, 100), (90, 90, 110, 110)):
        figures = RouterFigures(time_to_first_token=Distribution(bounds, counts, 1.0))
        trends.take(ClusterStatus(router=RouterView("router-0", figures=figures)), 1.0)
    assert trends.first_token_s(0.5) == pytest.approx(0.3)
    trends.take(ClusterStatus(router=RouterView("router-0", figures=RouterFigures())), 2.0)
    assert trends.first_token_s(0.5) is None
