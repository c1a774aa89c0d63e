"""A frame of `cacheaware top` for a terminal. Rendering only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cacheaware.top_frame import PUBLIC, Frame, TierLine

_BAR = 24  # cells
_NOTHING = "-"
_MOST_PROBLEMS = 8
_VERY_WIDE = 1000


def screen(frame: Frame) -> RenderableType:
    parts: list[RenderableType] = [_summary(frame), "", _Tiers(frame), "", _legend()]
    problems = frame.problems()
    if problems:
        parts += ["", _problems(problems)]
    return Group(*parts)


def _summary(frame: Frame) -> RenderableType:
    blocks = "KV blocks not known yet"
    if frame.capacity:
        used = frame.capacity - frame.free
        blocks = f"{used:,} of {frame.capacity:,} KV blocks used ({100 * used / frame.capacity:.0f} %)"
    lines = Table.grid(padding=(0, 3))
    lines.add_row(
        Text(frame.title, style="bold"),
        f"{frame.answered} of {len(frame.answers)} replicas",
        blocks,
        f"hit {_percent(frame.hit_percent)}",
    )
    lines.add_row("", f"{frame.queued} queued", f"{frame.running} running, {frame.waiting} waiting in the engine", "")
    return lines


class _Tiers:
    """A line for each tier; two tables of half a line where the terminal is too narrow for one."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = _table(self._frame, (*_REQUESTS, *_BLOCKS, *_LATENCIES))
        if console.measure(whole, options=options.update(max_width=_VERY_WIDE)).maximum <= options.max_width:
            yield whole
        else:
            yield _table(self._frame, (*_REQUESTS, *_LATENCIES, *_RATES))
            yield ""
            yield _table(self._frame, tuple(column for column in _BLOCKS if column not in _RATES))


_Column = tuple[str, Callable[[TierLine, int], str | Text]]

_REQUESTS: tuple[_Column, ...] = (
    ("QUEUE", lambda tier, _: _of_requests(tier, tier.queue)),
    ("RUN", lambda tier, _: _of_requests(tier, tier.running)),
    ("REQ/5M", lambda tier, _: _of_requests(tier, tier.requests)),
)
_RATES: tuple[_Column, ...] = (
    ("RECL/S", lambda tier, _: _rate(tier.reclaimed_a_second)),
    ("PREE/S", lambda tier, _: _rate(tier.preempted_a_second)),
)
_BLOCKS: tuple[_Column, ...] = (
    ("BLOCKS", lambda tier, scale: _bar(tier, scale)),
    ("HELD", lambda tier, _: str(tier.held)),
    ("CACHED", lambda tier, _: str(tier.cached)),
    ("NOMINAL", lambda tier, _: str(tier.nominal)),
    ("EFFECT", lambda tier, _: str(tier.effective)),
    ("BORROW", lambda tier, _: str(tier.borrowed)),
    ("LENT", lambda tier, _: str(tier.lent)),
    *_RATES,
)
_LATENCIES: tuple[_Column, ...] = (
    ("HIT", lambda tier, _: _percent(tier.hit_percent)),
    ("TTFT P50", lambda tier, _: _seconds(tier.time_to_first_token_p50)),
    ("P95", lambda tier, _: _seconds(tier.time_to_first_token_p95)),
    ("SLA", lambda tier, _: _percent(tier.attainment_percent)),
)


def _table(frame: Frame, columns: Sequence[_Column]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("TIER", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading == "BLOCKS" else "right", no_wrap=True)
    scale = max((max(tier.used, tier.nominal, tier.effective) for tier in frame.tiers), default=0)
    for tier in frame.tiers:
        table.add_row(tier.name, *(shown(tier, scale) for _, shown in columns))
    return table


def _of_requests(tier: TierLine, number: int) -> str:
    return "" if tier.name == PUBLIC else str(number)


def _bar(tier: TierLine, scale: int) -> Text:
    """Held, then cached; `|` stands where the nominal share ends. All tiers have one scale."""
    if not scale:
        return Text("")
    held = round(tier.held * _BAR / scale)
    used = round(tier.used * _BAR / scale)
    nominal = min(_BAR - 1, round(tier.nominal * _BAR / scale))
    bar = Text()
    for cell in range(_BAR):
        if cell == nominal:
            bar.append("|", style="bold")
        elif cell < held:
            bar.append("█", style="green" if cell < nominal else "yellow")
        elif cell < used:
            bar.append("▒", style="green" if cell < nominal else "yellow")
        else:
            bar.append("·", style="dim")
    return bar


def _legend() -> Text:
    return Text("█ held  ▒ cached  | nominal; beyond it: borrowed. TTFT of the slowest replica.", style="dim")


def _problems(problems: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for where, what in problems[:_MOST_PROBLEMS]:
        table.add_row(Text(where, style="yellow"), Text(what, overflow="fold"))
    if len(problems) > _MOST_PROBLEMS:
        table.add_row("", f"and {len(problems) - _MOST_PROBLEMS} more: cacheaware status shows all")
    return table


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0f} %"


def _rate(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.1f}" if value else "0"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
