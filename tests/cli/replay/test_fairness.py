"""How far a waiting tenant fell behind: work is counted while it waits, and compared with what is proved."""

from __future__ import annotations

import pytest

from cacheaware.replay.fairness import largest_lag
from cacheaware.replay.measures import Served
from cacheaware.replay.requests import Request


def served(tenant: str, arrived: float, sent: float, tokens: int, *, cached: int = 0, output: int = 0) -> Served:
    request = Request(f"{tenant}@{arrived}", arrived, "bronze", tenant, tokens, output, ())
    return Served(request, sent, cached_tokens=cached, output_tokens=output, first_token_at=sent, ended_at=sent)


FLOOD = [served("flood", 0.0, float(number), 100) for number in range(10)]


def test_what_others_get_while_a_tenant_waits_is_its_lag() -> None:
    lag = largest_lag([*FLOOD, served("quiet", 2.5, 6.5, 50)], 0.0)
    assert lag is not None
    assert (lag.behind, lag.ahead, lag.tokens) == ("quiet", "flood", 400.0)  # at 3, 4, 5 and 6
    assert lag.bound == 150.0
    assert lag.part == pytest.approx(400 / 150)


@pytest.mark.parametrize(
    ("quiet", "tokens"),
    [
        pytest.param([served("quiet", 2.5, 2.6, 50), served("quiet", 4.5, 4.6, 50)], None, id="it never waited long"),
        pytest.param(
            [served("quiet", 2.5, 3.5, 50), served("quiet", 2.6, 4.5, 50)], 150.0, id="what it got meanwhile counts"
        ),
        pytest.param([served("quiet", 2.5, 3.5, 50), served("quiet", 7.5, 8.5, 50)], 100.0, id="each wait begins anew"),
    ],
)
def test_only_what_happens_while_it_waits_counts(quiet: list[Served], tokens: float | None) -> None:
    flood = FLOOD[:1] + FLOOD[3:]  # it waits all the time too, and is behind nobody
    lag = largest_lag([*flood, *quiet], 0.0)
    behind = None if lag is None or lag.behind == "flood" else lag.tokens
    assert behind == tokens


def test_cached_tokens_are_no_work_and_generated_ones_count_twice() -> None:
    lag = largest_lag([served("a", 0.0, 1.0, 100, cached=90, output=5), served("b", 0.0, 2.0, 50)], 1000.0)
    assert lag is not None
    assert (lag.behind, lag.tokens, lag.bound) == ("b", 20.0, 1000.0 + 20.0 + 50.0)


def test_nobody_is_behind_where_nobody_waits_beside_another() -> None:
    assert largest_lag([served("a", 0.0, 0.0, 100), served("b", 1.0, 1.0, 50)], 0.0) is None
