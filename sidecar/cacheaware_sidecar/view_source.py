"""Which view is wanted: from the view file and from `PUT /pool/view`, the newer number wins.

A new uid is another pool object and always wins. A view that makes no sense is refused by the name of its field, and
the last good view stays in force.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from cacheaware_api import durations, quota, wire
from cacheaware_sidecar.tiers import promise_of


class ViewRefused(ValueError):
    """The view is wrong, or asks for what this sidecar cannot do; the message names the field."""


class StaleView(ValueError):
    """A newer view of the same pool is in force, or this number was used for another content."""


class ViewSource:
    """Holds the wanted view; `changed` is called with each new one."""

    def __init__(self, changed: Callable[[wire.View], None]) -> None:
        self._changed = changed
        self._view: wire.View | None = None
        self.problem: str | None = None  # why the last view offered by the file was not taken

    @property
    def view(self) -> wire.View | None:
        return self._view

    def offer(self, view: wire.View) -> bool:
        """Take a view; False if it is in force already. Raises `StaleView` or `ViewRefused`, and nothing changed."""
        check_view(view)
        current = self._view
        if current is not None and current.revision.pool_uid == view.revision.pool_uid:
            if view.revision.number < current.revision.number:
                raise StaleView(
                    f"revision.number {view.revision.number} is older than {current.revision.number}, which is in force"
                )
            if view.revision.number == current.revision.number:
                if view == current:
                    return False
                raise StaleView(
                    f"revision.number {view.revision.number} is in force with other content: count it up for a change"
                )
        self._view = view
        self._changed(view)
        return True

    def read_file(self, path: Path) -> None:
        """Offer what the file holds. Raises `ViewRefused`; an older view than the one in force is no error."""
        try:
            view = load_view(path)
            self.offer(view)
        except StaleView:
            self.problem = None  # PUT was faster; the file will follow
        except ViewRefused as error:
            self.problem = str(error)
            raise
        else:
            self.problem = None


def load_view(path: Path) -> wire.View:
    try:
        return wire.from_json(wire.View, json.loads(path.read_bytes()))
    except OSError as error:
        raise ViewRefused(f"{path}: {error.strerror}; --view-file needs the pool's view as JSON") from None
    except wire.WireError as error:
        raise ViewRefused(f"{path}: {error}") from None
    except (ValueError, RecursionError):
        raise ViewRefused(f"{path}: is not JSON") from None


def check_view(view: wire.View) -> None:
    """Raises `ViewRefused` for what a sidecar would otherwise only notice at the first request."""
    names = [tier.name for tier in view.tiers]
    if not names:
        raise ViewRefused("tiers: at least one is needed")
    if len(names) != len(set(names)):
        raise ViewRefused("tiers: names must be unique")
    if not all(name.isprintable() for name in names):
        raise ViewRefused("tiers: names must be printable, since answers have them in a header")
    if view.default_tier is not None and view.default_tier not in names:
        raise ViewRefused(f"defaultTier: names no tier; one of {', '.join(names)} was expected")
    for tier in view.tiers:
        if tier.weight < 1:
            raise ViewRefused(f"tiers[{tier.name}].weight: must be at least 1, got {tier.weight}")
        try:
            promise_of(tier)
        except ValueError as error:
            raise ViewRefused(f"tiers[{tier.name}].sla: {error}") from None
        try:
            durations.seconds(tier.batching_window)
        except durations.DurationError as error:
            raise ViewRefused(f"tiers[{tier.name}].batchingWindow: {error}") from None
    try:
        quota.quotas_for(view, capacity=1024)  # the engine's own capacity is not known yet; shares do not depend on it
    except wire.WireError as error:
        raise ViewRefused(str(error)) from None
