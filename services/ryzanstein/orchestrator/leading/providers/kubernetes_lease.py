"""The lease in Kubernetes: a Lease object of coordination.k8s.io, replaced by its resourceVersion.

Only versions and epochs are compared. The times in the object are for people.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ryzanstein.orchestrator.leading.lease import LeaseRecord, LeaseUnavailableError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EPOCH, _ADDRESS, _RENEWAL = (f"ryzanstein.io/{name}" for name in ("epoch", "address", "renewal"))
_MAX_ANSWER_BYTES = 2**20
_MAX_TRANSITIONS = 2**31 - 1
_GONE, _CONFLICT = 404, 409


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is, and the service account that calls it: its folder has a token, which is read for each call."""

    url: str
    account: Path = SERVICE_ACCOUNT

    @property
    def namespace(self) -> str:
        return (self.account / "namespace").read_text().strip()


class KubernetesLease:
    """A `LeaseProvider`: the Lease `name` in a namespace, which is created if it is missing."""

    def __init__(self, server: ApiServer, namespace: str, name: str, lease_s: float, timeout_s: float) -> None:
        self._server, self._name, self._namespace = server, name, namespace
        self._lease_s, self._timeout_s = lease_s, timeout_s
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    async def read(self) -> LeaseRecord:
        status, lease = await self._call("GET", f"{self._collection}/{self._name}")
        return LeaseRecord() if status == _GONE else _record(lease)

    async def replace(self, seen: LeaseRecord, wanted: LeaseRecord) -> LeaseRecord | None:
        body = self._lease(seen, wanted)
        if seen.version:
            status, lease = await self._call("PUT", f"{self._collection}/{self._name}", body)
        else:
            status, lease = await self._call("POST", self._collection, body)
        return None if status in (_GONE, _CONFLICT) else _record(lease)

    async def close(self) -> None:
        """Each call has a connection of its own."""

    def _lease(self, seen: LeaseRecord, wanted: LeaseRecord) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        metadata: dict[str, Any] = {
            "name": self._name,
            "namespace": self._namespace,
            # An object that is written as it was keeps its version.
            "annotations": {_EPOCH: str(wanted.epoch), _ADDRESS: wanted.address, _RENEWAL: uuid.uuid4().hex},
        }
        if seen.version:
            metadata["resourceVersion"] = seen.version
        spec = {
            "holderIdentity": wanted.holder,
            "leaseDurationSeconds": max(1, round(self._lease_s)),
            "leaseTransitions": min(wanted.epoch, _MAX_TRANSITIONS),
            "renewTime": now,
        }
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        try:
            status, text = await asyncio.to_thread(self._send, method, path, None if body is None else json.dumps(body))
            if status in (_GONE, _CONFLICT):
                return status, {}
            if not 200 <= status < 300:
                raise LeaseUnavailableError(f"{method} {path}: {status} {text[:200]!r}")
            answer = json.loads(text)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise LeaseUnavailableError(f"{method} {path}: {type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise LeaseUnavailableError(f"{method} {path}: the answer is no object")
        return status, answer

    def _send(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        token = self._server.account / "token"
        if token.exists():
            headers["Authorization"] = f"Bearer {token.read_text().strip()}"
        connection = self._connection()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER_BYTES)
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._server.url)
        if parts.scheme != "https":
            return http.client.HTTPConnection(parts.netloc, timeout=self._timeout_s)
        ca = self._server.account / "ca.crt"
        context = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)
        return http.client.HTTPSConnection(parts.netloc, timeout=self._timeout_s, context=context)


def _record(lease: dict[str, Any]) -> LeaseRecord:
    """Returns the record of a Lease. One that people made has no epoch, and counts as any other."""
    try:
        metadata, spec = lease["metadata"], lease.get("spec") or {}
        annotations = metadata.get("annotations") or {}
        version, holder = str(metadata["resourceVersion"]), str(spec.get("holderIdentity") or "")
        return LeaseRecord(version, holder, str(annotations.get(_ADDRESS, "")), int(annotations.get(_EPOCH, 0)))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LeaseUnavailableError(f"not a Lease: {type(error).__name__}: {error}") from error
