from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_api import durations


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        pytest.param("0s", 0, id="zero"),
        pytest.param("250ms", 250, id="milliseconds are no minutes"),
        pytest.param("1h30m", 5_400_000, id="two units"),
        pytest.param("1h2m3s4ms", 3_723_004, id="all units"),
        pytest.param("1s1s", 2_000, id="a unit twice adds up, as for the API server"),
        pytest.param("99999h", 359_996_400_000, id="the largest part"),
    ],
)
def test_a_duration_is_the_sum_of_its_parts(text: str, milliseconds: int) -> None:
    assert durations.milliseconds(text) == milliseconds
    assert durations.seconds(text) == milliseconds / 1000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "s",
        "-1s",
        "1.5s",
        "1 s",
        "1S",
        "1d",
        "1us",
        "100000s",
        "1s1s1s1s1s",
        "1s\n",
        "١s",
        "1s;",
        "9" * 1000 + "s",
    ],
)
def test_other_text_is_refused_and_the_message_says_what_was_expected(text: str) -> None:
    with pytest.raises(durations.DurationError, match="is not a duration such as") as caught:
        durations.milliseconds(text)
    assert len(str(caught.value)) < 120


@given(st.integers(0, 359_996_400_000))
def test_every_number_of_milliseconds_has_a_text_that_reads_back(value: int) -> None:
    text = durations.duration(value / 1000)
    assert durations.milliseconds(text) == value
    assert re.fullmatch(durations.PATTERN, text)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e300])
def test_what_no_duration_can_say_is_refused(value: float) -> None:
    with pytest.raises(durations.DurationError):
        durations.duration(value)
