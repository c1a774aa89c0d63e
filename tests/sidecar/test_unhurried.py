"""Work that nobody waits for: in which order it is done, and what else goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cacheaware_sidecar.unhurried import Unhurried


def noting(said: list[str], *words: str) -> Iterator[None]:
    for number, word in enumerate(words):
        if number:
            yield
        said.append(word)


async def test_work_of_one_step_is_done_at_once() -> None:
    said: list[str] = []
    Unhurried().add(noting(said, "a"))
    assert said == ["a"]


async def test_every_turn_of_the_loop_does_one_step_and_what_came_first_ends_first() -> None:
    said: list[str] = []
    unhurried = Unhurried()
    unhurried.add(noting(said, "a1", "a2", "a3"))
    unhurried.add(noting(said, "b"))
    turns = [list(said)]
    for _ in range(3):
        await asyncio.sleep(0)
        turns.append(list(said))
    assert turns == [["a1"], ["a1", "a2"], ["a1", "a2", "a3"], ["a1", "a2", "a3", "b"]]


async def test_work_that_fails_stops_nothing_else() -> None:
    said: list[str] = []

    def failing() -> Iterator[None]:
        yield
        raise ValueError("it failed")

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    unhurried = Unhurried()
    unhurried.add(failing())
    unhurried.add(noting(said, "after"))
    for _ in range(2):
        await asyncio.sleep(0)
    assert said == ["after"]
    assert [str(error) for error in told] == ["it failed"]


async def test_work_that_fails_at_once_is_told_to_who_added_it() -> None:
    def failing() -> Iterator[None]:
        raise ValueError("it failed")
        yield

    said: list[str] = []
    unhurried = Unhurried()
    with pytest.raises(ValueError, match="it failed"):
        unhurried.add(failing())
    unhurried.add(noting(said, "after"))
    assert said == ["after"]
