"""Which node runs a request: filter, score, pick over a frozen snapshot. Plain Python: neither grpc nor torch.

Every router comes to the same order from the same key and members, without a shared map.
"""

from ryzanstein.router.choose.affinity import Affinity, affinity
from ryzanstein.router.choose.candidates import NodeView, candidates, is_usable
from ryzanstein.router.choose.rendezvous import ranked

__all__ = ["Affinity", "NodeView", "affinity", "candidates", "is_usable", "ranked"]
