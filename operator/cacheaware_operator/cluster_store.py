"""What is known of the cluster: objects as watches and answers told them last. Reading it costs nothing.

Several tell of one object (a watch, a list, the answer to a write), not in order: the newer resource version counts.
A list also tells what is gone; of what was deleted a mark is kept, so that an older list does not bring it back.
Only what the operator looks at is kept of an object: hundreds of pools have thousands of pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cacheaware_operator.cluster.names import POOL_LABEL
from cacheaware_operator.kinds import DEPLOYMENT, POD, POOL, Kind, Object

_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "labels", "annotations", "ownerReferences")
_DROPPED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"  # as long as the object itself


@dataclass(frozen=True, slots=True)
class PoolKey:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ObjectKey:
    kind: Kind
    namespace: str
    name: str


def key_of(kind: Kind, written: Object) -> ObjectKey:
    metadata = written["metadata"]
    return ObjectKey(kind, metadata["namespace"], metadata["name"])


def pool_of(kind: Kind, written: Object) -> PoolKey | None:
    """The pool that an object is, or says by its label that it belongs to."""
    metadata = written["metadata"]
    if kind == POOL:
        return PoolKey(metadata["namespace"], metadata["name"])
    name = (metadata.get("labels") or {}).get(POOL_LABEL)
    return None if name is None else PoolKey(metadata["namespace"], name)


class ClusterStore:
    def __init__(self) -> None:
        self._objects: dict[ObjectKey, Object] = {}
        self._gone: dict[ObjectKey, int] = {}
        self._of_pool: dict[PoolKey, set[ObjectKey]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects.get(ObjectKey(kind, namespace, name))

    def all(self, kind: Kind) -> Iterator[Object]:
        return (found for key, found in self._objects.items() if key.kind == kind)

    def of_pool(self, pool: PoolKey, kind: Kind | None = None) -> list[tuple[ObjectKey, Object]]:
        """What carries the pool's label."""
        keys = self._of_pool.get(pool, ())
        return [(key, self._objects[key]) for key in keys if kind is None or key.kind == kind]

    def put(self, kind: Kind, written: Object) -> bool:
        """Whether that was news."""
        key, version = key_of(kind, written), _version(written)
        known = self._objects.get(key)
        if version <= max(self._gone.get(key, 0), 0 if known is None else _version(known)):
            return False
        self._gone.pop(key, None)
        self._forget(key)
        kept = _kept(kind, written)
        self._objects[key] = kept
        if (pool := pool_of(kind, kept)) is not None:
            self._of_pool.setdefault(pool, set()).add(key)
        return known is None or _without_version(known) != _without_version(kept)

    def remove(self, kind: Kind, written: Object) -> bool:
        """Whether that was news. `written` is the object's last state, with the version of its deletion."""
        key, version = key_of(kind, written), _version(written)
        known = self._objects.get(key)
        if known is not None and _version(known) > version:
            return False  # there is a later one of that name
        self._gone[key] = version
        self._forget(key)
        return known is not None

    def drop(self, kind: Kind, namespace: str, name: str) -> None:
        """Forget what is not looked at any more; it need not be gone."""
        self._forget(ObjectKey(kind, namespace, name))

    def replace(self, kind: Kind, namespace: str | None, listed: Iterable[Object], version: int) -> set[PoolKey]:
        """Take in a list of all pools, or of all labelled objects of a kind, read at `version`.

        The pools for which it held news.
        """
        there = {key_of(kind, each): each for each in listed}
        told: set[PoolKey] = set()
        for key, known in list(self._objects.items()):
            if key.kind != kind or namespace not in (None, key.namespace) or key in there:
                continue
            pool = pool_of(kind, known)
            if pool is not None and _version(known) <= version:
                self._forget(key)
                told.add(pool)
        for each in there.values():
            pool = pool_of(kind, each)
            if self.put(kind, each) and pool is not None:
                told.add(pool)
        self._gone = {key: at for key, at in self._gone.items() if key.kind != kind or at > version}
        return told

    def _forget(self, key: ObjectKey) -> None:
        known = self._objects.pop(key, None)
        pool = None if known is None else pool_of(key.kind, known)
        if pool is not None and (keys := self._of_pool.get(pool)) is not None:
            keys.discard(key)
            if not keys:
                del self._of_pool[pool]


def _version(written: Object) -> int:
    return int(written["metadata"]["resourceVersion"])


def _without_version(kept: Object) -> Object:
    metadata = {name: value for name, value in kept["metadata"].items() if name != "resourceVersion"}
    return {**kept, "metadata": metadata}


def _kept(kind: Kind, written: Object) -> Object:
    metadata = {name: written["metadata"][name] for name in _METADATA if name in written["metadata"]}
    if annotations := metadata.get("annotations"):
        metadata["annotations"] = {name: text for name, text in annotations.items() if name != _DROPPED_ANNOTATION}
    for name in ("deletionTimestamp", "creationTimestamp"):
        if written["metadata"].get(name):
            metadata[name] = written["metadata"][name]
    if kind == POD:
        return {"metadata": metadata, "status": written.get("status") or {}}
    kept = {**written, "metadata": metadata}
    if kind not in (POOL, DEPLOYMENT):
        kept.pop("status", None)
    return kept
