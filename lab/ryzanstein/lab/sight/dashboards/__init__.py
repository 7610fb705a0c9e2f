"""The dashboards: what each shows is a value of its module, and `drawing` makes Grafana's JSON of it."""

from __future__ import annotations

from ryzanstein.lab.sight.dashboards.cluster import CLUSTER
from ryzanstein.lab.sight.dashboards.failures import FAILURES
from ryzanstein.lab.sight.dashboards.models import MODELS
from ryzanstein.lab.sight.dashboards.ranks import RANKS

DASHBOARDS = (CLUSTER, MODELS, RANKS, FAILURES)
