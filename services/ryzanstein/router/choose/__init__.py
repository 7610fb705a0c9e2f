"""Chooses the node for a request: filters, scores and picks from what events keep of the nodes.

Plain Python: imports neither grpc nor torch. From the same key and the same members, every router
computes the same order, without a shared map.
"""

from ryzanstein.router.choose.affinity import Affinity, affinity, beginning
from ryzanstein.router.choose.members import Members, NodeGroup, OrderMemory
from ryzanstein.router.choose.model_routing import BalanceSettings, ChoiceObserver, ChoiceOutcome, Chooser, LazyOrder, Ranking
from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.policies import PolicyBounds, PolicyChoice, PolicyName
from ryzanstein.router.choose.recent_load import Imbalance, ImbalanceThresholds
from ryzanstein.router.choose.rendezvous import ranked

__all__ = [
    "Affinity",
    "BalanceSettings",
    "ChoiceObserver",
    "ChoiceOutcome",
    "Chooser",
    "Imbalance",
    "ImbalanceThresholds",
    "LazyOrder",
    "Members",
    "NodeGroup",
    "NodeView",
    "OrderMemory",
    "PolicyBounds",
    "PolicyChoice",
    "PolicyName",
    "Ranking",
    "affinity",
    "beginning",
    "ranked",
]
