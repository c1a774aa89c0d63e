"""From what a client sent to a request that is ready to queue: caller, body, tier, salt, prefix key, expected sizes.

It reads what was learned of earlier requests and changes nothing, so that a question about a request takes the same way
as the request itself. Raises `Refusal`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from multidict import MultiMapping

from cacheaware_api import wire
from cacheaware_sidecar.block_budget import Demand
from cacheaware_sidecar.costs import OutputLengths
from cacheaware_sidecar.errors import NoEngine
from cacheaware_sidecar.identity import Caller, identify
from cacheaware_sidecar.prefix_key import (
    CHUNK_BYTES,
    TEXT_BYTES_PER_TOKEN,
    PrefixKey,
    conversation_of,
    prefix_key,
    prefix_key_steps,
)
from cacheaware_sidecar.record import Record
from cacheaware_sidecar.relay import Translation
from cacheaware_sidecar.responses_answer import ResponseTranslation
from cacheaware_sidecar.responses_request import CHAT_PATH, response_request
from cacheaware_sidecar.responses_request import PATH as RESPONSES_PATH
from cacheaware_sidecar.rewrite import Asked, parse_generation
from cacheaware_sidecar.salt import cache_salt
from cacheaware_sidecar.scheduling import Waiting
from cacheaware_sidecar.secret_files import Secrets
from cacheaware_sidecar.tiers import Choice, choose_tier, loosened, promise_of
from cacheaware_sidecar.token_lengths import TokenLengths
from cacheaware_sidecar.view_source import ViewSource

_LONG_BODY = 64 * 1024  # bytes: its work is cut into steps


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of the engine, and on which of its paths."""

    path: str
    asked: Asked
    translation: Translation | None = None  # where the client speaks otherwise than the engine


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to queue."""

    wanted: Wanted
    choice: Choice
    salt: str
    key: PrefixKey | None
    waiting: Waiting
    demand: Demand | None = None  # of KV blocks, where admission goes by estimate

    @property
    def asked(self) -> Asked:
        return self.wanted.asked

    @property
    def tier(self) -> wire.ViewTier:
        return self.choice.tier

    @property
    def rejects_late(self) -> bool:
        return self.tier.admission is wire.Admission.REJECT


class Preparing:
    def __init__(
        self,
        *,
        views: ViewSource,
        secrets: Callable[[], Secrets],
        lengths: TokenLengths,
        outputs: OutputLengths,
        wall_clock: Callable[[], float],
    ) -> None:
        self._views = views
        self._secrets = secrets
        self._lengths = lengths
        self._outputs = outputs
        self._wall_clock = wall_clock

    def view(self) -> wire.View:
        if self._views.view is None:
            raise NoEngine("this replica has no pool yet: try again in a moment")
        return self._views.view

    def identify(self, headers: MultiMapping[str], record: Record) -> Caller:
        view = self.view()
        caller = identify(view.identity.type, headers, self._secrets().keys, view.default_tier)
        record.key_name = caller.key_name
        return caller

    def wanted(self, path: str, data: bytes, record: Record) -> Wanted:
        if path != RESPONSES_PATH:
            return Wanted(path, parse_generation(data))
        wanted = response_request(data)
        number, model = record.id.removeprefix("req-"), wanted.asked.body.get("model")
        translation = ResponseTranslation(number, record.time, model, wanted.repeated, self._wall_clock)
        return Wanted(CHAT_PATH, wanted.asked, translation)

    async def prepare(
        self, headers: MultiMapping[str], record: Record, wanted: Wanted, caller: Caller, view: wire.View
    ) -> Prepared:
        asked = wanted.asked
        choice = choose_tier(asked.service_tier, caller, view)
        tier = choice.tier
        record.tier, record.sequences, record.streams = tier.name, asked.sequences, asked.streams
        record.promise = loosened(promise_of(tier), headers)
        salt = cache_salt(
            self._secrets().salt_key, view.sharing, tier=tier.name, tenant=caller.tenant, request_id=record.id
        )
        key = await _key(wanted.path, asked, salt)
        first_token = record.promise.time_to_first_token
        waiting = Waiting(
            id=record.id,
            tier=tier.name,
            tenant=caller.fair_share,
            arrived=record.arrived,
            prompt_tokens=0 if key is None else self._lengths.tokens(key),
            output_tokens=self._outputs.expected(tier.name, asked.output_limit) * asked.sequences,
            deadline=None if first_token is None else record.arrived + first_token,
            chunks=() if key is None else key.chunks,
            chunk_tokens=CHUNK_BYTES / TEXT_BYTES_PER_TOKEN if key is None else self._lengths.chunk_tokens(key),
            conversation=conversation_of(asked.body, salt),
            sequences=asked.sequences,
            streams=asked.streams,
            size=asked.size,
        )
        return Prepared(wanted, choice, salt, key, waiting)


async def _key(path: str, asked: Asked, salt: str) -> PrefixKey | None:
    """Other requests go on while a long prompt is keyed."""
    if asked.size < _LONG_BODY:
        return prefix_key(path, asked.body, salt)
    steps = prefix_key_steps(path, asked.body, salt)
    while True:
        await asyncio.sleep(0)
        try:
            next(steps)
        except StopIteration as ended:
            key: PrefixKey | None = ended.value
            return key
