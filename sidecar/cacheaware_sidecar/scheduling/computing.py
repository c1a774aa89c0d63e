"""Prompts that the engine is computing now: when it will be through with them, and who computes a prefix first. Pure.

An engine computes prompts in the order in which they came, so their times add up. Where one takes longer or shorter
than expected, those behind it move with it. A time that has passed counts no more, whatever became of the prompt: one
that waits inside the engine for blocks keeps nobody else out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(slots=True)
class _Prompt:
    checkpoints: tuple[bytes, ...]
    ends: float  # when it should be computed


@dataclasses.dataclass(frozen=True, slots=True)
class Leader:
    """A request in the engine that computes a prefix others wait for, `checkpoints` long."""

    id: str
    checkpoints: int


class Computing:
    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}  # in the order of dispatch
        self._leaders: dict[bytes, list[str]] = {}
        self._free_at = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    def backlog(self, now: float) -> float:
        """Seconds until the engine is through with all of them."""
        return max(0.0, self._free_at - now)

    def ends(self, request_id: str) -> float:
        """When the prompt of a request that is computing should be done."""
        return self._prompts[request_id].ends

    def start(self, request_id: str, checkpoints: tuple[bytes, ...], now: float, seconds: float) -> None:
        """The engine gets it now, and needs so many seconds for it once those before it are done."""
        self._free_at = max(now, self._free_at) + seconds
        self._prompts[request_id] = _Prompt(checkpoints, self._free_at)
        leaders = self._leaders
        for checkpoint in checkpoints:
            if checkpoint in leaders:
                leaders[checkpoint].append(request_id)
            else:
                leaders[checkpoint] = [request_id]

    def done(self, request_id: str, now: float) -> bool:
        """Its first token came, or it left. False if it was not computing."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return False
        shift = now - prompt.ends
        prompts = iter(self._prompts.values())
        while next(prompts) is not prompt:
            pass  # those before it were to be done earlier anyway
        for other in prompts:
            ends = other.ends + shift
            other.ends = ends if ends > now else now
        del self._prompts[request_id]
        for checkpoint in prompt.checkpoints:
            leaders = self._leaders[checkpoint]
            if len(leaders) == 1:
                del self._leaders[checkpoint]
            else:
                leaders.remove(request_id)
        self._free_at = max(now, self._free_at + shift) if self._prompts else now
        return True

    def leader(self, checkpoints: Sequence[bytes]) -> Leader | None:
        """Who computes the longest start of this path right now; the one that was sent first, of several."""
        least, most = 0, len(checkpoints)
        while least < most:
            middle = (least + most + 1) // 2
            if checkpoints[middle - 1] in self._leaders:
                least = middle
            else:
                most = middle - 1
        return Leader(self._leaders[checkpoints[least - 1]][0], least) if least else None
