"""Draws a comparison: whose blocks the cache held over time, and what each policy hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheaware.replay.comparison import Comparison
from cacheaware.replay.simulation import Outcome

COLOURS = ("#d4a017", "#4c78a8", "#a0522d", "#59a14f", "#8a9299", "#b279a2")


def draw(comparison: Comparison, path: Path) -> None:
    """Write a PNG: a panel for each policy with quotas, and one of hits."""
    import matplotlib  # heavy: only where a picture is drawn

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [outcome for outcome in comparison.outcomes if outcome.effective is not None]
    figure, axes = pyplot.subplots(
        1, len(panels) + 1, figsize=(4 + 4 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    colours = dict(zip((tier.name for tier in comparison.setup.spec.tiers), COLOURS * 3, strict=False))
    for axis, outcome in zip(axes[0], panels, strict=False):
        _blocks(axis, outcome, comparison.setup.capacity, colours)
    _hits(axes[0][-1], comparison, colours)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _blocks(axis: Any, outcome: Outcome, capacity: int, colours: dict[str, str]) -> None:
    times = [usage.at for usage in outcome.usage]
    used = {name: [usage.blocks.get(name, 0) for usage in outcome.usage] for name in colours}
    axis.stackplot(times, list(used.values()), labels=list(used), colors=list(colours.values()), alpha=0.85)
    axis.set(title=outcome.policy, xlabel="seconds", ylabel="blocks")
    axis.set(xlim=(0, max(times, default=1)), ylim=(0, capacity))
    if outcome.rounds:  # up to where the first tier's effective share reaches
        name = next(iter(colours))
        shares = [capacity * each.effective[name] / 100 for each in outcome.rounds]
        axis.step(
            [each.at for each in outcome.rounds], shares, where="post", color="black", linestyle="--", linewidth=1
        )
    axis.legend(loc="upper right", frameon=False)


def _hits(axis: Any, comparison: Comparison, colours: dict[str, str]) -> None:
    whole = comparison.limits.prompt_tokens or 1
    names = [str(outcome.policy) for outcome in comparison.outcomes]
    parts = {
        name: [100 * outcome.tiers[name].hit_tokens / whole for outcome in comparison.outcomes] for name in colours
    }
    if comparison.limits.belady_hits is not None:
        names.append("belady")
        for name, part in parts.items():
            part.append(100 * comparison.limits.belady_hits.get(name, 0) / whole)
    below = [0.0] * len(names)
    for name, part in parts.items():
        axis.bar(names, part, bottom=below, color=colours[name], label=name)
        below = [low + more for low, more in zip(below, part, strict=True)]
    axis.axhline(comparison.limits.infinite_hit_percent, color="black", linestyle=":", linewidth=1)
    axis.set(title="hits, % of tokens")
    axis.tick_params(axis="x", rotation=30)
