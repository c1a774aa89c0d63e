"""Which requests belong together: those that share a prefix worth computing and reading once. Pure.

A tree over the prompts' checkpoints (every few chunks) of the requests that wait or run. A node's gain is what its
members save by sharing up to there, (members - 1) · depth. Of every node and its descendants the better choice is kept:
the node itself, or the best of its children together. A request's group is the topmost node on its path that is better
than what lies below it, so the groups are the antichain with the largest sum of gains, on one level.

A part of the tree with a single request is not unfolded, so there are never more nodes than shared checkpoints. Adding
and removing a request takes O(checkpoints that it shares).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

CHECKPOINT_CHUNKS = 16  # 256 tokens where a chunk has 16: shorter prefixes are not worth a group


@dataclasses.dataclass(slots=True)  # not frozen, which would take five times as long for every request
class Group:
    id: str
    chunks: int  # of the common prefix
    members: int


@dataclasses.dataclass(slots=True)
class _Alone:
    """A request that shares nothing more with anybody."""

    request_id: str
    path: tuple[bytes, ...]


@dataclasses.dataclass(slots=True)
class _Node:
    key: bytes
    depth: int  # checkpoints
    parent: _Node | None
    members: int = 0
    best: int = 0  # gain of this node, or of the best choice below it
    best_below: int = 0  # of the children together
    children: dict[bytes, _Node | _Alone] = dataclasses.field(default_factory=dict)
    ends_here: set[str] = dataclasses.field(default_factory=set)

    @property
    def gain(self) -> int:
        return max(0, self.members - 1) * self.depth


class GroupTree:
    def __init__(self, checkpoint_chunks: int = CHECKPOINT_CHUNKS) -> None:
        if checkpoint_chunks < 1:
            raise ValueError(f"checkpoint_chunks must be at least 1, got {checkpoint_chunks}")
        self._every = checkpoint_chunks
        self._root = _Node(b"", 0, None)
        self._paths: dict[str, tuple[bytes, ...]] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __deepcopy__(self, memo: Mapping[int, object]) -> GroupTree:
        """Built anew: a tree of long prompts is deeper than copying it part by part may recurse."""
        copied = GroupTree(self._every)
        for request_id, path in self._paths.items():
            copied._add(request_id, path)
        return copied

    def checkpoints(self, chunks: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(chunks[self._every - 1 :: self._every])

    def path_of(self, request_id: str) -> tuple[bytes, ...]:
        """Checkpoints of a request that is here."""
        return self._paths[request_id]

    def add(self, request_id: str, chunks: Sequence[bytes]) -> None:
        if request_id in self._paths:
            raise ValueError(f"request {request_id} is in the tree already")
        self._add(request_id, self.checkpoints(chunks))

    def remove(self, request_id: str) -> bool:
        """False if it is not in the tree."""
        path = self._paths.pop(request_id, None)
        if path is None:
            return False
        node = self._root
        node.members -= 1
        while True:
            if len(path) == node.depth:
                node.ends_here.remove(request_id)
                break
            child = node.children[path[node.depth]]
            if isinstance(child, _Alone):
                del node.children[path[node.depth]]
                break
            node = child
            node.members -= 1
        self._settle(self._folded(node))
        return True

    def group_of(self, request_id: str) -> Group | None:
        """None: it has nobody to share enough with, or is not here."""
        path = self._paths.get(request_id)
        if path is None:
            return None
        node = self._root
        for checkpoint in path:
            child = node.children.get(checkpoint)
            if not isinstance(child, _Node):
                return None
            node = child
            if _is_group(node):
                return self._group(node)
        return None

    def groups(self) -> Iterator[Group]:
        """All groups, in no particular order; what they save together is the most that can be saved on one level."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            if not node.best:
                continue
            if _is_group(node):
                yield self._group(node)
            else:
                nodes.extend(child for child in node.children.values() if isinstance(child, _Node))

    def check_integrity(self) -> None:
        """Every sum is that of the requests in the tree, and nothing is unfolded that need not be."""
        assert self._check(self._root) == len(self._paths)

    # -- the tree ------------------------------------------------------------------------------------------------------

    def _group(self, node: _Node) -> Group:
        return Group(node.key[:8].hex(), node.depth * self._every, node.members)

    def _add(self, request_id: str, path: tuple[bytes, ...]) -> None:
        self._paths[request_id] = path
        node = self._root
        node.members += 1
        while True:
            if len(path) == node.depth:
                node.ends_here.add(request_id)
                break
            child = node.children.get(path[node.depth])
            if child is None:
                node.children[path[node.depth]] = _Alone(request_id, path)
                break
            if isinstance(child, _Alone):
                child = node.children[path[node.depth]] = self._unfold(node, child)
            node = child
            node.members += 1
        self._settle(node)

    def _unfold(self, parent: _Node, alone: _Alone) -> _Node:
        node = _Node(alone.path[parent.depth], parent.depth + 1, parent, members=1)
        if len(alone.path) == node.depth:
            node.ends_here.add(alone.request_id)
        else:
            node.children[alone.path[node.depth]] = alone
        return node

    def _folded(self, node: _Node) -> _Node:
        """Fold up what has become a single request or nobody; the lowest node that is left on the way to the root."""
        while node.parent is not None and node.members <= 1:
            parent = node.parent
            if node.members == 0:
                del parent.children[node.key]
            else:
                parent.children[node.key] = self._last(node)
            parent.best_below -= node.best
            node = parent
        return node

    def _last(self, node: _Node) -> _Alone:
        if node.ends_here:
            (request_id,) = node.ends_here
            return _Alone(request_id, self._paths[request_id])
        (child,) = node.children.values()
        assert isinstance(child, _Alone), "what is below has been folded before"
        return child

    def _settle(self, node: _Node | None) -> None:
        """The number of members has changed here and in all that leads here."""
        while node is not None:
            before, below = node.best, node.best_below
            gain = (node.members - 1) * node.depth if node.members > 1 else 0
            node.best = best = gain if gain > below else below
            node = node.parent
            if node is not None:
                node.best_below += best - before

    def _check(self, node: _Node) -> int:
        members = len(node.ends_here)
        below = 0
        for key, child in node.children.items():
            if isinstance(child, _Alone):
                assert child.path[node.depth] == key
                members += 1
                continue
            assert child.parent is node
            assert child.key == key
            assert child.members >= 2, "a single request is not unfolded"
            members += self._check(child)
            below += child.best
        assert node.members == members
        assert node.best_below == below
        assert node.best == max(node.gain, below)
        return members


def _is_group(node: _Node) -> bool:
    """Whether it is no worse than the best choice below it. Of those on one path the topmost is the group."""
    return node.best > 0 and (node.members - 1) * node.depth == node.best
