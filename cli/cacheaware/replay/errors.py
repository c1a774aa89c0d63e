"""What stops a replay before it starts; every message names the file, the line or the option, and what to do."""

from __future__ import annotations


class ReplayError(Exception):
    """Shown to the user as it is."""
