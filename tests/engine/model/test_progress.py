"""A library's progress bars become percentages for whoever asked for them."""

from __future__ import annotations

from contextlib import redirect_stderr

from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

from cacheaware_engine.progress import ProgressBars


def test_the_bars_that_matter_are_passed_on_and_nothing_is_drawn() -> None:
    said: list[tuple[str, float | None]] = []
    with redirect_stderr(ProgressBars("quantizing", "Unpacking", lambda text, fraction: said.append((text, fraction)))):
        for _ in tqdm(range(4), desc="Converting and de-quantizing tensors...", mininterval=0):
            pass
        for _ in tqdm(range(3), desc="Something else", mininterval=0):
            pass
    assert [fraction for _, fraction in said[:5]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert {text for text, _ in said} == {"Unpacking"}
    assert len(said) <= 6, "of the other bar nothing is said; the last state may be drawn twice"
