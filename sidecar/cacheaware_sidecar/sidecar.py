"""Composition: the parts of one sidecar, put together, started, drained and stopped. It decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import aiohttp

from cacheaware_api import durations, wire
from cacheaware_api.conditions import ConditionType
from cacheaware_api.conditions import Reason as ConditionReason
from cacheaware_sidecar import upstream
from cacheaware_sidecar.app import create_app
from cacheaware_sidecar.block_budget import BlockBudget
from cacheaware_sidecar.budget import SlotBudget, slots_of
from cacheaware_sidecar.control_app import create_control_app
from cacheaware_sidecar.costs import OutputLengths
from cacheaware_sidecar.dispatch import Dispatcher
from cacheaware_sidecar.divergence import Divergence
from cacheaware_sidecar.engine_client import EngineClient
from cacheaware_sidecar.engine_link import EngineLink
from cacheaware_sidecar.engine_state import Link
from cacheaware_sidecar.engine_steps import follow_steps
from cacheaware_sidecar.estimated_link import EstimatedLink
from cacheaware_sidecar.estimates import Estimates
from cacheaware_sidecar.explain import Decisions
from cacheaware_sidecar.figures import Figures
from cacheaware_sidecar.foresight import Foresight
from cacheaware_sidecar.gate import Gate
from cacheaware_sidecar.group_hints import SHOWN_GROUPS, GroupHints, tell_hints
from cacheaware_sidecar.http_server import listening
from cacheaware_sidecar.logs import values
from cacheaware_sidecar.metrics import LedgerCollector, Metrics, WorkingSetCollector
from cacheaware_sidecar.prefix_key import KEY_ALGORITHM
from cacheaware_sidecar.preparing import Preparing
from cacheaware_sidecar.proxy import Proxy
from cacheaware_sidecar.record import Recorder
from cacheaware_sidecar.scheduling import Scheduler, Terms
from cacheaware_sidecar.secret_files import API_KEYS, CONTROL_TOKEN, SALT_KEY, Secrets, SecretsError, load_secrets
from cacheaware_sidecar.settings import Settings
from cacheaware_sidecar.token_lengths import TokenLengths
from cacheaware_sidecar.traffic import Traffic
from cacheaware_sidecar.view_source import ViewRefused, ViewSource
from cacheaware_sidecar.watched_files import POLL_SECONDS, WatchedFiles
from cacheaware_sidecar.working_set import WorkingSets

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """Where it listens, once it does; they differ from the settings where those say 0."""

    port: int
    control_port: int


class Sidecar:
    """One sidecar. `async with Sidecar(settings).serving() as ports: ...`

    Constructing it reads view and secrets; raises `ViewRefused` or `SecretsError`. A `scheduler` has the same clock.
    """

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.monotonic, scheduler: Scheduler | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._secrets = load_secrets(settings.secrets_dir)
        self._secret_files = WatchedFiles(settings.secrets_dir / name for name in (SALT_KEY, CONTROL_TOKEN, API_KEYS))
        self._view_files = WatchedFiles([settings.view_file])
        self.failed = asyncio.Event()  # a part that should run for ever has not
        self.no_accounts: str | None = None  # what the engine said that turned out to keep none
        self.traffic = Traffic()
        self.blocks = BlockBudget() if settings.kv_socket is None else None
        self.scheduler = scheduler or Scheduler(clock=clock)
        self.dispatcher = Dispatcher(settings.max_queue, self.scheduler, budget=SlotBudget(blocks=self.blocks))
        self.dispatcher.set_slots(slots_of(None, settings.engine_slots))
        self.gate = Gate(self.dispatcher, clock)
        self.lengths = TokenLengths()
        self.outputs = OutputLengths()
        self.decisions = Decisions()
        self.figures = Figures()
        self.metrics = Metrics(self._tier_names, self.gate.queued_of)
        self.working_sets = WorkingSets()
        self.divergence = Divergence()
        self.hints = GroupHints()
        self.metrics.registry.register(WorkingSetCollector(self.working_sets.tiers))
        self._link: Link | None = None
        self._proxy: Proxy | None = None
        self.views = ViewSource(self._view_changed)
        self.views.read_file(settings.view_file)

    @property
    def link(self) -> Link:
        assert self._link is not None, "the link exists while the sidecar is serving"
        return self._link

    @property
    def secrets(self) -> Secrets:
        """Those in force."""
        return self._secrets

    @property
    def proxy(self) -> Proxy:
        assert self._proxy is not None, "the proxy exists while the sidecar is serving"
        return self._proxy

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Ports]:
        """Serve both sides until the block ends; raises `OSError` for a port in use."""
        settings = self._settings
        async with (
            upstream.engine_session(settings.connect_timeout) as session,
            EngineClient(settings.engine_url, connect_timeout=settings.connect_timeout) as engine,
            self._linked(session) as (link, estimates, following),
        ):
            self._link = link
            estimated = link.enforcement is wire.Enforcement.ESTIMATE_ONLY
            self.metrics.registry.register(LedgerCollector(lambda: link.ledger, estimated=estimated))
            if self.views.view is not None:
                link.want(self.views.view)
            preparing = Preparing(
                views=self.views,
                secrets=lambda: self._secrets,
                lengths=self.lengths,
                outputs=self.outputs,
                wall_clock=time.time,
            )
            proxy = self._proxy = Proxy(
                settings,
                engine,
                preparing=preparing,
                link=link,
                gate=self.gate,
                lengths=self.lengths,
                outputs=self.outputs,
                working_sets=self.working_sets,
                divergence=self.divergence,
                traffic=self.traffic,
                recorder=Recorder(self.metrics, self.figures, self.decisions, self._clock),
                estimates=estimates,
                clock=self._clock,
            )
            app = create_app(proxy, link.state, self.gate, self.traffic, self.metrics, session, settings.engine_url)
            foresight = Foresight(
                preparing,
                link=link,
                gate=self.gate,
                traffic=self.traffic,
                estimates=estimates,
                most_bytes=settings.max_body_bytes,
                clock=self._clock,
            )
            control = create_control_app(
                views=self.views,
                secrets=lambda: self._secrets,
                state=link.state,
                traffic=self.traffic,
                metrics=self.metrics,
                decisions=self.decisions,
                status=self.status,
                foresight=foresight,
            )
            async with (
                listening(app, settings.host, settings.port, head_seconds=settings.idle_timeout) as port,
                listening(
                    control, settings.control_host, settings.control_port, head_seconds=settings.idle_timeout
                ) as control_port,
                _running(self.failed, link.run(), self._watch_files(), *following),
            ):
                log.info("serving", extra=values(port=port, control_port=control_port, engine=settings.engine_url))
                yield Ports(port, control_port)

    @contextlib.asynccontextmanager
    async def _linked(
        self, session: aiohttp.ClientSession
    ) -> AsyncIterator[tuple[Link, Estimates | None, tuple[Coroutine[Any, Any, None], ...]]]:
        """The link to the engine; estimates, where it keeps no account of blocks; and what else is to be followed."""
        settings, url = self._settings, self._settings.engine_url
        if settings.kv_socket is not None:
            async with upstream.kv_session(str(settings.kv_socket)) as kv_session:
                following = [follow_steps(kv_session, self.scheduler.step)]
                if settings.group_hints:
                    following.append(tell_hints(kv_session, self._news_of_groups))
                yield (
                    EngineLink(
                        session,
                        kv_session,
                        url,
                        on_ledger=self._ledger_changed,
                        on_restart=self.scheduler.engine_restarted,
                        on_no_accounts=self._has_no_accounts,
                    ),
                    None,
                    tuple(following),
                )
            return
        assert self.blocks is not None, "without a KV socket blocks are counted here"
        link = EstimatedLink(
            session,
            url,
            self.dispatcher.budget,
            sequences=settings.engine_slots,
            on_ledger=self._ledger_changed,
            on_restart=self.scheduler.engine_restarted,
            no_accounts=settings.no_accounts,
        )
        yield link, Estimates(self.blocks, link.hits, self.lengths), ()

    async def drain(self) -> bool:
        """Stop being ready, refuse new requests, let those inside finish; False if some did not in time."""
        log.info("draining", extra=values(inside=self.traffic.inside, seconds=self._settings.drain_timeout))
        return await self.traffic.drain(self._settings.drain_timeout)

    def status(self) -> wire.PoolStatus:
        now = self._clock()
        ledger = self.link.ledger
        view = self.views.view
        return wire.PoolStatus(
            applied=self.link.state.applied,
            capacity=None if ledger is None else ledger.capacity,
            ledger=ledger,
            tiers={name: self.figures.of(name, self.gate.queued_of(name), now) for name in self._tier_names()},
            enforcement=self.link.enforcement,
            conditions=(*self.link.conditions(), *(() if view is None else (_identity_condition(view),))),
            key_algorithm=KEY_ALGORITHM,
            advice=self.divergence.advice(),
            groups=tuple(self._groups(now)),
        )

    def _groups(self, now: float) -> Iterator[wire.GroupFigures]:
        hinted = self.hints.blocks
        for group in self.scheduler.active_groups.top(SHOWN_GROUPS, now):
            yield wire.GroupFigures(
                id=group.id,
                tier=group.tier,
                requests_per_minute=round(60 * group.requests_a_second, 1),
                conversations=group.conversations,
                prefix_tokens=group.prefix_tokens,
                context_tokens=group.context_tokens,
                growth_tokens=group.growth_tokens,
                hinted_blocks=hinted.get(group.id),
            )

    def _news_of_groups(self) -> wire.Hints | None:
        if (ledger := self.link.ledger) is None:
            return None
        now = self._clock()
        return self.hints.news(self.scheduler.active_groups.top(SHOWN_GROUPS, now), ledger, now)

    def _has_no_accounts(self, why: str) -> None:
        """Nothing was served yet: whoever runs this starts one that estimates."""
        if self.no_accounts is None:
            self.no_accounts = why
            self.failed.set()

    # -- changes -------------------------------------------------------------------------------------------------------

    def _view_changed(self, view: wire.View) -> None:
        log.info("new view", extra=values(revision=view.revision.number, tiers=",".join(t.name for t in view.tiers)))
        self.scheduler.set_terms(
            {
                tier.name: Terms(tier.weight, tier.priority, durations.seconds(tier.batching_window))
                for tier in view.tiers
            }
        )
        names = tuple(tier.name for tier in view.tiers)
        self.figures.keep(names)
        self.metrics.keep(names)
        self.working_sets.keep(names)
        self.divergence.keep(names)
        if self._link is not None:
            self._link.want(view)

    def _ledger_changed(self, ledger: wire.Ledger) -> None:
        self.dispatcher.set_slots(slots_of(ledger, self._settings.engine_slots))
        self.dispatcher.engine_waiting = ledger.waiting
        self.scheduler.set_engine(ledger.capacity * ledger.block_size, ledger.bytes_per_token, ledger.block_size)
        self.gate.pump()

    async def _watch_files(self) -> None:
        """A file that is wrong leaves the last good one in force; it is read again when it changes again."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._secret_files.changed():
                try:
                    self._secrets = load_secrets(self._settings.secrets_dir)
                    log.info("secrets read again")
                except SecretsError as error:
                    log.error("the last good secrets stay in force", extra=values(problem=str(error)))
            if self._view_files.changed():
                try:
                    self.views.read_file(self._settings.view_file)
                except ViewRefused as error:
                    log.error("the last good view stays in force", extra=values(problem=str(error)))

    def _tier_names(self) -> tuple[str, ...]:
        return () if self.views.view is None else tuple(tier.name for tier in self.views.view.tiers)


def _identity_condition(view: wire.View) -> wire.Condition:
    kind = str(ConditionType.IDENTITY_ENFORCED)
    if view.identity.type is wire.IdentityType.OPEN:
        message = "anyone who reaches the port may use any tier; set identity.type to APIKeys to change it"
        return wire.Condition(kind, "False", str(ConditionReason.OPEN), message)
    if view.identity.type is wire.IdentityType.TRUSTED_HEADERS:
        return wire.Condition(kind, "True", str(ConditionReason.TRUSTED_HEADERS))
    return wire.Condition(kind, "True", str(ConditionReason.API_KEYS))


@contextlib.asynccontextmanager
async def _running(failed: asyncio.Event, *work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run tasks that never end by themselves beside the block; `failed` is set when one does."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("a part of the sidecar failed", exc_info=task.exception())
            failed.set()

    tasks = [asyncio.create_task(one) for one in work]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
