"""A frame of `cacheaware top` for a terminal. Rendering only."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cacheaware.top_frame import PUBLIC, Frame, TierLine

_BAR = 24  # cells
_NOTHING = "-"
_MOST_PROBLEMS = 8


def screen(frame: Frame) -> RenderableType:
    parts: list[RenderableType] = [_summary(frame), "", _tiers(frame), "", _legend()]
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


def _tiers(frame: Frame) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("TIER", no_wrap=True)
    for heading in ("QUEUE", "RUN", "REQ/5M"):
        table.add_column(heading, justify="right")
    table.add_column("BLOCKS", no_wrap=True, min_width=_BAR)
    for heading in ("HELD", "CACHED", "NOMINAL", "EFFECT", "BORROW", "LENT", "RECL/S", "PREE/S"):
        table.add_column(heading, justify="right")
    for heading in ("HIT", "TTFT P50", "P95", "SLA"):
        table.add_column(heading, justify="right")
    scale = max((max(tier.used, tier.nominal, tier.effective) for tier in frame.tiers), default=0)
    for tier in frame.tiers:
        blocks = (tier.held, tier.cached, tier.nominal, tier.effective, tier.borrowed, tier.lent)
        requests = ("", "", "") if tier.name == PUBLIC else (tier.queue, tier.running, tier.requests)
        table.add_row(
            tier.name,
            *map(str, requests),
            _bar(tier, scale),
            *map(str, blocks),
            _rate(tier.reclaimed_a_second),
            _rate(tier.preempted_a_second),
            _percent(tier.hit_percent),
            _seconds(tier.time_to_first_token_p50),
            _seconds(tier.time_to_first_token_p95),
            _percent(tier.attainment_percent),
        )
    return table


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
