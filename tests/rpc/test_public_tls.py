"""gRPC with the certificates of clients: each kind of key that is taken serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from tests.public_certificates import PublicAuthority

from ryzanstein.auth.certificates.metrics import CertificateMetrics
from ryzanstein.auth.certificates.public import PublicCertificates
from ryzanstein.rpc.server import RpcServer
from ryzanstein.rpc.tls.public_tls import public_port

KEYS = [
    pytest.param(ec.generate_private_key(ec.SECP256R1()), id="P-256"),
    pytest.param(ec.generate_private_key(ec.SECP384R1()), id="P-384"),
    pytest.param(rsa.generate_private_key(65537, 2048), id="RSA-2048"),
]


@pytest.mark.parametrize("key", KEYS)
async def test_clients_reach_a_server_by_the_name_in_its_certificate_alone(tmp_path: Path, key: Any) -> None:
    files = PublicAuthority().write(tmp_path, ("localhost",), key=key)
    certificates = PublicCertificates(files.certificate, files.key, CertificateMetrics("test", CollectorRegistry()))
    server = RpcServer("127.0.0.1", 0, [], certificates=public_port(certificates))
    await server.start()
    try:
        for host, reached in (("localhost", True), ("127.0.0.1", False)):
            trusting = grpc.ssl_channel_credentials(files.ca.read_bytes())
            async with grpc.aio.secure_channel(f"{host}:{server.port}", trusting) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
                if reached:
                    assert (await check).status == health_pb2.HealthCheckResponse.SERVING
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await check
    finally:
        await server.stop(0)
