"""The tree knows what a plain list of chunks, least recently used first, would know: no more and no less."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cacheaware_sidecar.scheduling.prefix_tree import PrefixTree

TEXTS = st.text("ab", max_size=10)


def chunks(text: str) -> tuple[bytes, ...]:
    """One chained chunk a letter."""
    return tuple(text[: end + 1].encode() for end in range(len(text)))


class TreeAndList(RuleBasedStateMachine):
    """The list: every chunk with its note, each use of a prompt moving all of its chunks to the end, its tail first."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.list: OrderedDict[bytes, int | None] = OrderedDict()
        self.seen: set[str] = set()

    @rule(text=TEXTS, capacity=st.integers(1, 25))
    def insert(self, text: str, capacity: int) -> None:
        self.seen.add(text)
        self.tree.insert(chunks(text))
        for chunk in reversed(chunks(text)):
            self.list.setdefault(chunk)
            self.list.move_to_end(chunk)
        self.shrink(capacity)

    @rule(capacity=st.integers(0, 25))
    def shrink(self, capacity: int) -> None:
        self.tree.shrink(capacity)
        while len(self.list) > capacity:
            self.list.popitem(last=False)

    @rule(text=TEXTS, depth=st.integers(0, 10), value=st.integers(0, 99))
    def leave_note(self, text: str, depth: int, value: int) -> None:
        self.tree.leave_note(chunks(text), depth, value)
        if 0 < depth <= len(text) and chunks(text)[depth - 1] in self.list:
            self.list[chunks(text)[depth - 1]] = value

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.list.clear()

    @rule(text=TEXTS)
    def same_match(self, text: str) -> None:
        known = [chunk in self.list for chunk in chunks(text)]
        assert known == sorted(known, reverse=True)
        assert self.tree.matched(chunks(text)) == sum(known)

    @invariant()
    def same_content(self) -> None:
        self.tree.check_integrity()
        assert len(self.tree) == len(self.list)
        for text in self.seen:
            path = chunks(text)
            for depth, chunk in enumerate(path, 1):
                assert self.tree.note_at(path, depth) == self.list.get(chunk)
            assert self.tree.matched(path) == sum(chunk in self.list for chunk in path)


TestTreeAndList = TreeAndList.TestCase
TestTreeAndList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_prompt_that_goes_on_makes_one_run_longer() -> None:
    tree = PrefixTree()
    for length in range(1, 11):
        tree.insert(chunks("abcdefghij"[:length]))
    assert len(tree._runs) == 1
    tree.insert(chunks("abcx"))
    assert len(tree._runs) == 3, "a branch, and what each side has of its own"
