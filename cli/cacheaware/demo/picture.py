"""Draws the blocks of each tier over time: quotas off beside quotas on."""

from __future__ import annotations

from pathlib import Path

from cacheaware.demo.report import KIND_TITLES, Report, Run

COLOURS = {"gold": "#d4a017", "silver": "#8a9299", "bronze": "#a0522d", "public": "#4c78a8"}


def draw(report: Report, path: Path) -> None:
    """Write a PNG of the first run of each crowded kind."""
    import matplotlib  # heavy: only where a picture is drawn

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [next(run for run in report.runs if run.kind == kind) for kind in ("off", "on")]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 4.2), sharey=True, layout="constrained")
    for axis, run in zip(axes, panels, strict=True):
        _panel(axis, run)
    axes[0].set_ylabel("KV blocks")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.suptitle("KV blocks in use by each tier, held and cached")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: object, run: Run) -> None:
    times = [sample.at for sample in run.samples]
    owners = [owner for owner in COLOURS if any(sample.used.get(owner) for sample in run.samples)]
    axis.stackplot(  # type: ignore[attr-defined]  # matplotlib has no stubs here
        times,
        [[sample.used.get(owner, 0) for sample in run.samples] for owner in owners],
        labels=owners,
        colors=[COLOURS[owner] for owner in owners],
        alpha=0.85,
    )
    if nominal := run.nominal.get("gold"):
        axis.axhline(nominal, color="black", linestyle="--", linewidth=1, label="gold's nominal share")  # type: ignore[attr-defined]
    axis.set(  # type: ignore[attr-defined]
        title=KIND_TITLES[run.kind], xlabel="seconds", xlim=(0, max(times, default=1)), ylim=(0, run.capacity)
    )
