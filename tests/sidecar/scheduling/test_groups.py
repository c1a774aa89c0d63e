"""Groups: the antichain of shared prefixes with the largest gain, whatever comes and goes."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheaware_sidecar.scheduling.groups import GroupTree


def chunks(text: str) -> tuple[bytes, ...]:
    """One chained chunk a letter, so that prompts share what their texts start with."""
    return tuple(text[: end + 1].encode() for end in range(len(text)))


def tree_of(*prompts: str, every: int = 1) -> GroupTree:
    tree = GroupTree(every)
    for number, prompt in enumerate(prompts):
        tree.add(str(number), chunks(prompt))
    return tree


def groups_of(tree: GroupTree, count: int) -> list[int | None]:
    """Chunks of each request's group."""
    found = [tree.group_of(str(number)) for number in range(count)]
    return [None if group is None else group.chunks for group in found]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        pytest.param(["abc"], [None], id="alone"),
        pytest.param(["abc", "xyz"], [None, None], id="nothing shared"),
        pytest.param(["abc", "abd"], [2, 2], id="two share two chunks"),
        pytest.param(["abc", "abc"], [3, 3], id="equal prompts"),
        pytest.param(["ab", "abcd"], [2, 2], id="one starts with the other"),
        # (3 - 1) · 1 against (2 - 1) · 4: the long prefix of two is worth more than the short one of three
        pytest.param(["abcd", "abcd", "axyz"], [4, 4, None], id="few share much"),
        # (4 - 1) · 3 against 2 · (2 - 1) · 4
        pytest.param(["abcd", "abcd", "abce", "abce"], [3, 3, 3, 3], id="many share a little less"),
    ],
)
def test_the_groups_are_those_with_the_largest_gain(prompts: list[str], expected: list[int | None]) -> None:
    assert groups_of(tree_of(*prompts), len(prompts)) == expected


def test_a_prefix_shorter_than_a_checkpoint_is_no_group() -> None:
    tree = tree_of("abcdefgh", "abcxyzuv", every=4)
    assert groups_of(tree, 2) == [None, None]


def test_members_are_counted_and_the_id_is_that_of_the_prefix() -> None:
    tree = tree_of("abx", "aby", "abz")
    group = tree.group_of("0")
    assert group is not None
    assert all(tree.group_of(str(number)) == group for number in range(3))
    assert group.members == 3
    assert group.id == b"ab".hex()


def test_a_group_ends_with_its_last_but_one_member() -> None:
    tree = tree_of("abc", "abd")
    assert tree.remove("1") is True
    assert tree.remove("1") is False
    assert groups_of(tree, 1) == [None]


def test_many_requests_that_share_nothing_take_no_nodes() -> None:
    tree = GroupTree(1)
    for number in range(1000):
        tree.add(str(number), chunks(chr(1000 + number) * 500))
    assert len(tree._root.children) == 1000
    assert all(type(child).__name__ == "_Alone" for child in tree._root.children.values())


def test_all_groups_are_those_of_its_requests() -> None:
    tree = tree_of("abx", "aby", "abz", "qrs", "qrt", "alone")
    found = {(group.id, group.chunks, group.members) for group in tree.groups()}
    assert found == {(b"ab".hex(), 2, 3), (b"qr".hex(), 2, 2)}


def best_gain(prompts: list[str]) -> int:
    """The largest gain by trying all: a prefix against the best choice for those below it."""

    def best(prefix: str) -> int:
        members = [prompt for prompt in prompts if prompt.startswith(prefix)]
        if len(members) < 2:
            return 0
        below = sum(best(prefix + letter) for letter in {p[len(prefix)] for p in members if len(p) > len(prefix)})
        return max((len(members) - 1) * len(prefix), below)

    return best("")


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = GroupTree(1)
        self.prompts: dict[str, str] = {}
        self.number = 0

    @rule(prompt=st.text("ab", max_size=6))
    def add(self, prompt: str) -> None:
        self.number += 1
        self.prompts[str(self.number)] = prompt
        self.tree.add(str(self.number), chunks(prompt))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        assert self.tree.remove(request_id)
        del self.prompts[request_id]

    @invariant()
    def groups_are_the_best_antichain(self) -> None:
        self.tree.check_integrity()
        groups = {name: self.tree.group_of(name) for name in self.prompts}
        prefixes: dict[str, int] = {}
        for name, group in groups.items():
            if group is not None:
                prefix = self.prompts[name][: group.chunks]
                prefixes[prefix] = prefixes.get(prefix, 0) + 1
        for one, other in combinations(prefixes, 2):
            assert not one.startswith(other), "one level only"
            assert not other.startswith(one), "one level only"
        gain = sum((members - 1) * len(prefix) for prefix, members in prefixes.items())
        assert gain == best_gain(list(self.prompts.values()))
        assert sorted((group.chunks, group.members) for group in self.tree.groups()) == sorted(
            (len(prefix), members) for prefix, members in prefixes.items()
        )


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
