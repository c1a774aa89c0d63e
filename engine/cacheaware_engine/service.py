"""What both servers stand on: where the process is in its life, and what it needs to answer once it is ready.

Turns checked requests into submissions: tokens counted, limits applied, ids minted. HTTP is `app.py` and `kv_app.py`;
getting from settings to a ready model is `startup.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from .chat import Tokenizer
from .engine_thread import EngineThread
from .errors import BadRequest, EngineBroke, NotServed, Unavailable
from .logs import values
from .metrics import Metrics
from .openai_requests import ChatRequest, CompletionRequest, Limits, Prompt, Wanted
from .requests import Generation, Submission, request_ids

if TYPE_CHECKING:
    from .structured_output import Constraint, Grammars

log = logging.getLogger(__name__)

MAX_REPORTED_PROMPT = 4096
"""Tokens of a prompt whose log-probabilities are told: it is computed in small chunks, past the cache."""

DEFAULT_TIER = "default"
"""Whom a request without a tier is charged to. No tier of a pool can have this name, so quotas refuse such requests."""


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ok"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A loaded model and the engine that runs it."""

    tokenizer: Tokenizer
    engine: EngineThread
    limits: Limits
    max_model_len: int
    created: int
    """When it was loaded, in seconds since the epoch."""
    grammars: Grammars | None = None


class Service:
    """One served model, from the first request that is told to wait to the last that is drained."""

    def __init__(self, model_name: str, source: str, metrics: Metrics) -> None:
        self.model_name = model_name
        self.source = source
        self.metrics = metrics
        self.draining = False
        self._ready: ReadyModel | None = None
        self._mint = request_ids()
        self._open_calls = 0
        self._no_calls = asyncio.Event()
        self._no_calls.set()

    # -- phases -------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self._ready is None:
            return Phase.LOADING
        if self._ready.engine.death is not None:
            return Phase.DEAD
        return Phase.DRAINING if self.draining else Phase.READY

    @property
    def death(self) -> BaseException | None:
        return self._ready.engine.death if self._ready is not None else None

    def ready(self) -> ReadyModel:
        """The model, if new requests may use it."""
        model = self.running()
        if self.draining:
            raise Unavailable("this engine is shutting down: send the request elsewhere", code="draining")
        return model

    def running(self) -> ReadyModel:
        """The model, as long as its engine runs: also while it drains."""
        if self._ready is None:
            raise Unavailable("the model is still loading: try again in a moment", code="loading")
        if self.death is not None:
            raise EngineBroke(f"the engine broke and is about to restart: {self.death}", code="engine_broke")
        return self._ready

    def loaded(self, model: ReadyModel) -> None:
        self._ready = model

    def call_started(self) -> None:
        self._open_calls += 1
        self._no_calls.clear()

    def call_ended(self) -> None:
        self._open_calls -= 1
        if self._open_calls == 0:
            self._no_calls.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuse what comes from now on, and give what is being answered so long to finish."""
        self.draining = True
        try:
            await asyncio.wait_for(self._no_calls.wait(), timeout_s)
        except TimeoutError:
            log.warning("requests were cut off at the end of the drain timeout", extra=values(calls=self._open_calls))

    # -- from requests to submissions ---------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest, label: str) -> list[Submission]:
        model = self.ready()
        self.require_model(request.wanted.model)
        prompt = await asyncio.to_thread(model.tokenizer.chat, request.messages)
        constraint = await _constraint(model, request.wanted)
        return [self._submission(request.wanted, prompt, "messages", label, 0, constraint)]

    async def completion(self, request: CompletionRequest, label: str) -> list[Submission]:
        """Each prompt is a request of its own, in accounts and in queues."""
        model = self.ready()
        self.require_model(request.wanted.model)
        prompts = await asyncio.to_thread(_encode_all, model.tokenizer, request.prompts)
        constraint = await _constraint(model, request.wanted)
        return [
            self._submission(request.wanted, prompt, "prompt", label, number * request.wanted.n, constraint)
            for number, prompt in enumerate(prompts)
        ]

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise NotServed(
                f"the model {name!r} does not exist: this engine serves {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _submission(
        self,
        wanted: Wanted,
        prompt: Sequence[int],
        param: str,
        label: str,
        first_index: int,
        constraint: Constraint | None,
    ) -> Submission:
        max_tokens = most_tokens(wanted, len(prompt), self.ready().max_model_len, param)
        if wanted.prompt_logprobs is not None and len(prompt) > MAX_REPORTED_PROMPT:
            raise BadRequest(
                f"prompt_logprobs: of prompts of at most {MAX_REPORTED_PROMPT} tokens, and this one has {len(prompt)}",
                param="prompt_logprobs",
            )
        return Submission(
            id=self._mint(),
            tier=wanted.placement.tier or DEFAULT_TIER,
            prompt=tuple(prompt),
            generation=Generation(
                sampling=wanted.sampling,
                max_tokens=max_tokens,
                min_tokens=min(wanted.min_tokens, max_tokens),
                stop=wanted.stop,
                stop_token_ids=wanted.stop_token_ids,
                ignore_eos=wanted.ignore_eos,
                n=wanted.n,
                constraint=constraint,
                prompt_logprobs=wanted.prompt_logprobs,
            ),
            salt=wanted.placement.salt,
            priority=wanted.placement.priority,
            group=wanted.placement.group,
            first_index=first_index,
            label=label,
        )


def most_tokens(wanted: Wanted, prompt_tokens: int, max_model_len: int, param: str) -> int:
    """How many tokens may be made: as asked, or as many as fit where nothing was asked. Refuses what does not fit."""
    if prompt_tokens == 0:
        raise BadRequest(f"{param}: the prompt is empty, there is nothing to continue", param=param)
    room = max_model_len - prompt_tokens
    if room < 1:
        raise BadRequest(
            f"this model's context is {max_model_len} tokens, and the prompt alone has {prompt_tokens}: "
            f"shorten it to at most {max_model_len - 1}",
            param=param,
            code="context_length_exceeded",
        )
    asked = wanted.max_tokens
    if asked is None or (asked > room and wanted.max_tokens_is_default):
        return room
    if asked > room:
        raise BadRequest(
            f"this model's context is {max_model_len} tokens, and {prompt_tokens} of prompt and {asked} of "
            f"{wanted.max_tokens_field} are {prompt_tokens + asked}: ask for at most {room}",
            param=wanted.max_tokens_field,
            code="context_length_exceeded",
        )
    return asked


async def _constraint(model: ReadyModel, wanted: Wanted) -> Constraint | None:
    if wanted.schema is None or model.grammars is None:  # a schema is refused where there are no grammars
        return None
    return await asyncio.to_thread(model.grammars.constraint, wanted.schema)


def _encode_all(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
