"""Recent prompts' chunks as a tree of runs, least recently used first, tails first. Pure.

A run is a stretch of chunks without a branch. Chunks are chained digests, so two runs that agree in a chunk agree in
all that precede it: a match looks at the last chunk of each run on its way and searches in halves within the last one.
So matching and inserting take O(runs on the path · log), however long the prompt is; forgetting takes O(1) a chunk.

What is known of a prompt is always a prefix of it: a use makes a whole path recent, its tail least, so the least recent
run is a leaf, and loses its last chunks first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class _Run:
    """`notes` are values at numbers of chunks within the run, where somebody left one."""

    __slots__ = ("children", "chunks", "notes", "parent")

    def __init__(self, chunks: tuple[bytes, ...], parent: _Run | None) -> None:
        self.chunks = chunks
        self.parent = parent
        self.children: dict[bytes, _Run] | None = None  # by their first chunk; None: a leaf
        self.notes: dict[int, int] | None = None


class PrefixTree:
    def __init__(self) -> None:
        self._root = _Run((), None)
        self._runs: OrderedDict[_Run, None] = OrderedDict()  # least recently used first
        self._size = 0

    def __len__(self) -> int:
        """Chunks that are known."""
        return self._size

    def matched(self, chunks: Sequence[bytes]) -> int:
        """How many leading chunks are known."""
        run, depth, length = self._root, 0, len(chunks)
        while depth < length:
            children = run.children
            child = None if children is None else children.get(chunks[depth])
            if child is None:
                break
            own = child.chunks
            end = depth + len(own)
            if end > length or own[-1] != chunks[end - 1]:
                return depth + _common(own, chunks, depth)
            run, depth = child, end
        return depth

    def match(self, chunks: Sequence[bytes]) -> tuple[int, int | None]:
        """How many leading chunks are known, and what was left at the last of them."""
        run, place, depth, length = self._root, 0, 0, len(chunks)
        while depth < length:
            children = run.children
            child = None if children is None else children.get(chunks[depth])
            if child is None:
                break
            run, own = child, child.chunks
            place = len(own)
            if depth + place > length or own[-1] != chunks[depth + place - 1]:
                place = _common(own, chunks, depth)
                depth += place
                break
            depth += place
        return depth, None if run.notes is None else run.notes.get(place)

    def insert(self, chunks: tuple[bytes, ...]) -> None:
        """These are known, and the most recent ones, from now on."""
        run, depth, length = self._root, 0, len(chunks)
        path: list[_Run] = []
        while depth < length:
            child = None if run.children is None else run.children.get(chunks[depth])
            if child is None:
                path.append(self._grown(run, chunks[depth:]))
                break
            end = depth + len(child.chunks)
            if end > length or child.chunks[-1] != chunks[end - 1]:
                common = _common(child.chunks, chunks, depth)
                child = self._split(child, common)
                end = depth + common
            path.append(child)
            run, depth = child, end
        runs = self._runs
        for one in reversed(path):
            runs[one] = None
            runs.move_to_end(one)

    def shrink(self, capacity: int) -> None:
        """Forget the least recent chunks until so many are left."""
        while self._size > capacity:
            run = next(iter(self._runs))
            left = len(run.chunks) - (self._size - capacity)
            if left > 0:
                run.chunks = run.chunks[:left]
                run.notes = _part(run.notes, 0, left)
                self._size = capacity
                return
            assert run.children is None, "what follows a chunk is forgotten before it"
            assert run.parent is not None
            assert run.parent.children is not None
            del self._runs[run]
            del run.parent.children[run.chunks[0]]
            run.parent.children = run.parent.children or None
            self._size -= len(run.chunks)

    def note_at(self, chunks: Sequence[bytes], depth: int) -> int | None:
        """What was left at so many leading chunks; None: nothing, or they are not known."""
        found = self._at(chunks, depth)
        if found is None or found[0].notes is None:
            return None
        return found[0].notes.get(found[1])

    def leave_note(self, chunks: Sequence[bytes], depth: int, value: int, *, first: bool = False) -> None:
        """Where so many leading chunks are known; it goes with the last of them. `first`: unless one was left."""
        found = self._at(chunks, depth)
        if found is None:
            return
        run, place = found
        if run.notes is None:
            run.notes = {place: value}
        elif not first or place not in run.notes:
            run.notes[place] = value

    def clear(self) -> None:
        self._root = _Run((), None)
        self._runs.clear()
        self._size = 0

    def check_integrity(self) -> None:
        """Every run is where its first chunk says, no leaf is more recent than what leads to it, and sizes add up."""
        order = {run: place for place, run in enumerate(self._runs)}
        assert self._size == sum(len(run.chunks) for run in self._runs)
        for run in self._runs:
            assert run.chunks
            assert run.parent is not None
            assert run.parent.children is not None
            assert run.parent.children[run.chunks[0]] is run
            assert run.parent is self._root or order[run.parent] > order[run]
            assert run.children != {}
            assert all(0 < place <= len(run.chunks) for place in run.notes or ())

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _at(self, chunks: Sequence[bytes], depth: int) -> tuple[_Run, int] | None:
        """The run in which so many leading chunks end, and how many of its own these are."""
        if not 0 < depth <= len(chunks):
            return None
        run, before = self._root, 0
        while True:
            child = None if run.children is None else run.children.get(chunks[before])
            if child is None:
                return None
            place = depth - before
            if place <= len(child.chunks):
                return (child, place) if child.chunks[place - 1] == chunks[depth - 1] else None
            before += len(child.chunks)
            if child.chunks[-1] != chunks[before - 1]:
                return None
            run = child

    def _grown(self, run: _Run, rest: tuple[bytes, ...]) -> _Run:
        """A run that ends with the rest: this one, if nothing else follows it."""
        self._size += len(rest)
        if run.children is None and run is not self._root:
            run.chunks += rest
            return run
        leaf = _Run(rest, run)
        if run.children is None:
            run.children = {}
        run.children[rest[0]] = leaf
        return leaf

    def _split(self, run: _Run, place: int) -> _Run:
        """Cut a run after so many chunks; the first part, which is new. It is about to become the most recent one."""
        parent = run.parent
        assert parent is not None
        assert parent.children is not None
        upper = _Run(run.chunks[:place], parent)
        parent.children[upper.chunks[0]] = upper
        upper.children = {run.chunks[place]: run}
        upper.notes = _part(run.notes, 0, place)
        run.notes = _part(run.notes, place, len(run.chunks))
        run.chunks, run.parent = run.chunks[place:], upper
        return upper


def _common(run: Sequence[bytes], chunks: Sequence[bytes], depth: int) -> int:
    """How many chunks of the run are those that follow at `depth`; the first one is."""
    least, most = 1, min(len(run), len(chunks) - depth)
    while least < most:
        middle = (least + most + 1) // 2
        if run[middle - 1] == chunks[depth + middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least


def _part(notes: dict[int, int] | None, after: int, until: int) -> dict[int, int] | None:
    if notes is None:
        return None
    return {place - after: value for place, value in notes.items() if after < place <= until} or None
