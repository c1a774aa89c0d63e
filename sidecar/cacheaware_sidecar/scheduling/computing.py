"""Prompts that the engine is computing now: when it will be through with them, and who computes a prefix first. Pure.

An engine computes prompts in the order in which they came, several short ones in one step, so their parts of steps add
up, and none is done before it would be alone. Where one takes longer or shorter than expected, those behind it move
with it. A time that has passed counts no more, whatever became of the prompt: one
that waits inside the engine for blocks keeps nobody else out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(slots=True)
class _Prompt:
    checkpoints: tuple[bytes, ...]
    earliest: float  # when it would be computed if it were alone
    through: float  # when the engine is through with it and those before it

    @property
    def ends(self) -> float:
        return max(self.earliest, self.through)


@dataclasses.dataclass(frozen=True, slots=True)
class Leader:
    """A request in the engine that computes a prefix others wait for, `checkpoints` long."""

    id: str
    checkpoints: int


class Computing:
    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}  # in the order of dispatch
        self._leaders: dict[bytes, list[str]] = {}
        self.free_at = 0.0  # when the engine is through with all of them

    def __len__(self) -> int:
        return len(self._prompts)

    def backlog(self, now: float) -> float:
        """Seconds until the engine is through with all of them."""
        return max(0.0, self.free_at - now)

    def ends(self, request_id: str) -> float:
        """When the prompt of a request that is computing should be done."""
        return self._prompts[request_id].ends

    def start(
        self, request_id: str, checkpoints: tuple[bytes, ...], now: float, seconds: float, packed: float | None = None
    ) -> None:
        """The engine gets it now. It takes so many seconds alone, and `packed` of a step that it shares with others."""
        self.free_at = max(now, self.free_at) + (seconds if packed is None else packed)
        self._prompts[request_id] = _Prompt(checkpoints, now + seconds, self.free_at)
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
        shift = now - prompt.through
        prompts = iter(self._prompts.values())
        while next(prompts) is not prompt:
            pass  # those before it were to be done earlier anyway
        for other in prompts:
            through = other.through + shift
            other.through = through if through > now else now
        del self._prompts[request_id]
        for checkpoint in prompt.checkpoints:
            leaders = self._leaders[checkpoint]
            if len(leaders) == 1:
                del self._leaders[checkpoint]
            else:
                leaders.remove(request_id)
        self.free_at = max(now, self.free_at + shift) if self._prompts else now
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
