"""When a part that ended is started again."""

import pytest

from cacheaware_operator.backoff import Exit, Restart, after_exit, describe_exit


@pytest.mark.parametrize(
    ("failures", "delay"),
    [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16), (5, 30), (6, 30), (10_000, 30)],
)
def test_each_further_exit_doubles_the_wait_up_to_thirty_seconds(failures: int, delay: float) -> None:
    restart = after_exit(Exit(code=-9, was_ever_ready=True, healthy_seconds=0), failures)
    assert restart == Restart(delay=delay, failures=failures + 1)


def test_a_minute_of_health_makes_the_next_exit_the_first_again() -> None:
    assert after_exit(Exit(-9, True, healthy_seconds=60.0), 7) == Restart(delay=1, failures=1)
    assert after_exit(Exit(-9, True, healthy_seconds=59.9), 2) == Restart(delay=4, failures=3)


@pytest.mark.parametrize("code", [1, 2])
def test_a_part_that_says_at_its_first_start_that_it_cannot_run_is_not_tried_again(code: int) -> None:
    assert after_exit(Exit(code, was_ever_ready=False, healthy_seconds=0), 0) is None


@pytest.mark.parametrize("code", [-9, 3, 0])
def test_a_part_that_dies_silently_before_it_was_ever_ready_is_tried_three_times(code: int) -> None:
    exit_ = Exit(code, was_ever_ready=False, healthy_seconds=0)
    assert after_exit(exit_, 0) is not None
    assert after_exit(exit_, 1) is not None
    assert after_exit(exit_, 2) is None


@pytest.mark.parametrize("code", [0, 1, 2, 3, -9, -11])
def test_a_part_that_was_ready_once_is_always_started_again(code: int) -> None:
    assert after_exit(Exit(code, was_ever_ready=True, healthy_seconds=0), 50) is not None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        pytest.param(2, "exit code 2", id="code"),
        pytest.param(-9, "killed by SIGKILL", id="signal"),
        pytest.param(-99, "killed by signal 99", id="unnamed signal"),
    ],
)
def test_an_exit_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code, {9: "SIGKILL"}) == words
