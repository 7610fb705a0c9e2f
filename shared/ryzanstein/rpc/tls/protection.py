"""How a service is protected, as it answers in its status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ryzanstein.config import ServiceSettings
from ryzanstein.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from ryzanstein.rpc.tls.service_tls import ServiceTls


def protection_to_wire(settings: ServiceSettings, tls: ServiceTls | None) -> pb.Protection:
    """Returns the protection of a service, with the certificate that it uses now."""
    told = pb.Protection(insecure=settings.exposed, tls=settings.tls)
    if tls is not None:
        told.certificate_expires.CopyFrom(Timestamp(seconds=int(tls.expires)))
        told.certificate_life.CopyFrom(Duration(seconds=int(tls.life_s)))
    return told
