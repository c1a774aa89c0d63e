"""Requests to the API server, as the operator needs them; every failure is one of our errors.

aiohttp on the event loop rather than the official client in threads: that one checks and copies every object into
classes, a few milliseconds of the one interpreter lock for a Deployment, and hundreds of pools need thousands of
requests a minute. Credentials are still read by the official client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from cacheaware_operator.errors import ApiRefused, ApiUnreachable, FieldConflict
from cacheaware_operator.kinds import Kind, Object
from cacheaware_operator.kubernetes_credentials import Credentials

FIELD_MANAGER = "cacheaware-operator"
APPLY, MERGE, JSON = "application/apply-patch+yaml", "application/merge-patch+json", "application/json"
_TIMEOUT = aiohttp.ClientTimeout(total=20, connect=5)
_CONCURRENT = 16  # requests at once: a restart with hundreds of pools must not be a flood
_PAGE = "500"


@dataclass(frozen=True, slots=True)
class Listed:
    items: tuple[Object, ...]
    version: int  # of the collection, when it was read


class KubernetesApi:
    """The session is the caller's. `writes` counts the requests that may have changed something."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials) -> None:
        self._session = session
        self._credentials = credentials
        self._tls = credentials.tls()
        self._slots = asyncio.Semaphore(_CONCURRENT)
        self.writes = 0

    async def get(self, path: str) -> Any:
        return await self._request("GET", path)

    async def find(self, path: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            found: Object = await self._request("GET", path)
        except ApiRefused as error:
            if error.status == 404:
                return None
            raise
        return found

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listed:
        query = {"limit": _PAGE} | ({"labelSelector": selector} if selector else {})
        items: list[Object] = []
        while True:
            page = await self._request("GET", kind.path(namespace), query=query)
            items += page.get("items") or ()
            token = page["metadata"].get("continue")
            if not token:
                return Listed(tuple(items), int(page["metadata"]["resourceVersion"]))
            query = query | {"continue": token}

    async def apply(self, path: str, wanted: Object) -> Object:
        """Server-side apply, never forced; raises `FieldConflict` where a field is another manager's."""
        query = {"fieldManager": FIELD_MANAGER, "force": "false"}
        applied: Object = await self._request("PATCH", path, wanted, APPLY, query)
        return applied

    async def merge_patch(self, path: str, patch: Object) -> Object:
        patched: Object = await self._request("PATCH", path, patch, MERGE, {"fieldManager": FIELD_MANAGER})
        return patched

    async def create(self, path: str, written: Object) -> Object:
        created: Object = await self._request("POST", path, written, JSON, {"fieldManager": FIELD_MANAGER})
        return created

    async def replace(self, path: str, written: Object) -> Object:
        replaced: Object = await self._request("PUT", path, written, JSON, {"fieldManager": FIELD_MANAGER})
        return replaced

    async def delete(self, path: str, uid: str) -> None:
        """Only that very object, not a later one of its name; that it is gone already is as good."""
        try:
            await self._request("DELETE", path, {"preconditions": {"uid": uid}}, JSON)
        except ApiRefused as error:
            if error.status not in (404, 409):
                raise

    async def _request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        headers = {"Accept": JSON, "Content-Type": content_type}
        if authorization := self._credentials.authorization:
            headers["Authorization"] = " ".join(authorization)
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        async with self._slots:
            self.writes += method != "GET"
            try:
                async with self._session.request(
                    method,
                    self._credentials.server + path,
                    params=query,
                    data=data,
                    headers=headers,
                    ssl=self._tls if self._tls is not None else True,
                    timeout=_TIMEOUT,
                ) as response:
                    text = await response.text()
                    status = response.status
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = str(error) or type(error).__name__
                raise ApiUnreachable(f"{method} {path}: the API server does not answer: {why}") from error
        answer = _decoded(text)
        if status >= 400:
            raise _refusal(method, path, status, answer)
        return answer


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _refusal(method: str, path: str, status: int, answer: Any) -> ApiRefused:
    body: dict[str, Any] = answer if isinstance(answer, dict) else {"message": str(answer)[:500]}
    reason, message = str(body.get("reason", "")), str(body.get("message", ""))
    causes = (body.get("details") or {}).get("causes") or ()
    conflicts = [each for each in causes if each.get("reason") == "FieldManagerConflict"]
    if status == 409 and conflicts:
        return FieldConflict(path, [(_manager(each.get("message", "")), each.get("field", "")) for each in conflicts])
    return ApiRefused(status, reason, f"{method} {path}: {status} {reason}: {message}")


def _manager(message: str) -> str:
    """From `conflict with "kubectl-edit" using apps/v1`."""
    quoted = message.split('"')
    return quoted[1] if len(quoted) > 2 else message
