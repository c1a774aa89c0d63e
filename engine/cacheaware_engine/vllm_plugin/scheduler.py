"""vLLM's scheduler with the rules of quota: who is let in, who gets blocks, who gives way.

Decisions are the block pool's (`accounts.py`); here they are carried out through a few narrow places of vLLM:

- before a step, running requests get the blocks that they are about to need, and what an entitled waiter is owed is
  taken back; whoever gives way is preempted by vLLM's own `_preempt_request`;
- in the step, `_handle_blocked_waiting_request` says of each waiter in its turn whether it may start;
- `get_computed_blocks` tells what it hits, and vLLM's queue of free blocks (`free_queue.py`) hands out its table;
- `cache_full_blocks` and `KVCacheManager.free` tell the pool what was computed and what was given back.

So inside the step nothing is left to decide and vLLM never has to preempt. One lock parts steps from the KV side.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from cacheaware_engine.blocks import Admitted, BlockPoolError, Ended, Grown, NeverFits, Request, Yielded

from .accounts import Accounts, Record
from .agreement import assert_agreement
from .control import Control
from .errors import PluginRefused
from .free_queue import NULL_BLOCKS, TableQueue
from .kv_server import serve
from .public_prefixes import Tokenizer
from .settings import Settings
from .step_costs import StepCosts
from .suitability import reasons_against

log = init_logger("vllm.cacheaware")

_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class TierScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is not there when types are checked
    """One engine core's scheduler. Its KV side is served from its own thread if the environment names a socket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if reasons := reasons_against(self.vllm_config, self.kv_cache_config):
            raise PluginRefused(reasons)
        settings = Settings.from_environment()
        manager, config = self.kv_cache_manager, self.kv_cache_config
        bytes_per_token = _bytes_per_token(config, self.block_size)
        self.accounts = Accounts(
            config.num_blocks - NULL_BLOCKS,
            self.block_size,
            self.max_num_active_reqs,
            max_model_len=self.max_model_len,
            bytes_per_token=bytes_per_token,
        )
        self.costs = StepCosts(bytes_per_token)
        self.lock = threading.RLock()
        self._served: Any = None  # the request that vLLM is allocating for
        self._over: list[Any] = []  # requests that ended here; told with the next outputs
        self._in_step = False  # vLLM walks through its queues: nobody may be taken out of them
        self._ending: dict[str, tuple[Any, Any]] = {}  # requests to end, and how, once that is over
        manager.watermark_blocks = 0  # room to grow is the pool's to keep
        pool = manager.block_pool
        pool.free_block_queue = TableQueue(pool.blocks, self._take)
        pool.cache_full_blocks = functools.partial(self._cache_full_blocks, pool.cache_full_blocks)
        manager.get_computed_blocks = functools.partial(self._get_computed_blocks, manager.get_computed_blocks)
        manager.allocate_slots = functools.partial(self._allocate_slots, manager.allocate_slots)
        manager.free = functools.partial(self._free, manager.free)
        tokenizer = Tokenizer(self.vllm_config.model_config)
        self.control = Control(self.accounts.pool, self.costs, self.lock, tokenizer, self.block_size)
        self._check = settings.check_every_step
        if settings.kv_socket is None:
            log.warning("cacheaware: no CACHEAWARE_KV_SOCKET is set, so no quotas can arrive: tiers share one LRU")
        else:
            serve(self.control, settings.kv_socket)
        log.info(
            "cacheaware: tier quotas over %d blocks of %d tokens; KV side: %s",
            self.accounts.pool.capacity, self.block_size, settings.kv_socket,
        )  # fmt: skip

    # -- vLLM's calls -------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        with self.lock:
            super().add_request(request)
            if request.resumable:
                self._refuse(request, "sessions with streamed input are not supported with tier quotas")
            elif request.status in _READY:  # otherwise its grammar is still being made
                self._arrive(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.accounts.step_begins()
            self._grow_running()
            if self.pause_state is PauseState.UNPAUSED:
                self._reclaim()
                self._rouse_idle_engine()
            self._in_step = True
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self._in_step = False
            for request, status in self._ending.values():
                self._finish(request, status)
            self._ending.clear()
            self.costs.scheduled(output, self.requests)
            if self._check:
                assert_agreement(self)
            return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        with self.lock:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self.costs.computed(scheduler_output)
            over, self._over = self._over, []
            for request in over:
                client = outputs.get(request.client_index)
                if client is None:
                    client = outputs[request.client_index] = EngineCoreOutputs(outputs=[])
                client.outputs.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=[],
                        finish_reason=request.get_finished_reason(),
                        events=request.take_events(),
                        trace_headers=request.trace_headers,
                    )
                )
            return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        with self.lock:
            return super().finish_requests(request_ids, finished_status)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        with self.lock:
            done = bool(super().reset_prefix_cache(*args, **kwargs))
            if done:
                self.accounts.pool.evict_cached()
            return done

    # -- before a step ------------------------------------------------------------------------------------------------

    def _grow_running(self) -> None:
        """Every running request gets the blocks that this step can fill, or gives way now."""
        of, block_size, most = self.accounts.of, self.block_size, self.max_model_len
        for request in tuple(self.running):
            record = of(request.request_id)
            tokens = request.num_tokens + request.num_output_placeholders
            if record is None or tokens <= len(record.account.tables[0]) * block_size:
                continue  # the common case: this loop is walked in every step
            if not record.running or record.ending:
                continue  # it gave way to one before it
            wanted = min(self.accounts.blocks_for(min(tokens, most)), record.account.max_blocks)
            while len(record.table) < wanted:
                growth = self.accounts.grow(record)
                self._preempt(growth.preempted)
                if isinstance(growth, Yielded):
                    self._preempt([record.account])
                elif isinstance(growth, Ended):
                    self._end(record)
                if not isinstance(growth, Grown):
                    break

    def _reclaim(self) -> None:
        for record in self.accounts.reclaimers():
            if record.request.status in _READY:
                self._offer(record, preempt=True)

    def _rouse_idle_engine(self) -> None:
        """Idle cache never idles the engine: where nothing runs, the oldest waiter that fits goes, lending aside."""
        pool = self.accounts.pool
        if pool.running or not pool.waiting:
            return
        for idle in (False, True):
            for account in pool.waiting:
                record = self.accounts.of(account.id)
                if record is not None and self._may_start_now(record.request) and self._offer(record, idle=idle):
                    return

    # -- waiters ------------------------------------------------------------------------------------------------------

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if not super()._handle_blocked_waiting_request(request) or not self._may_start_now(request):
            return False
        record = self.accounts.of(request.request_id)
        if record is None:
            record = self._arrive(request)  # its grammar is ready
        if record is None:
            return False
        if not record.running:
            for each in self.accounts.in_turn(record):
                if self._may_start_now(each.request):
                    self._offer(each)
        return record.running

    def _may_start_now(self, request: Any) -> bool:
        """Not while tokens of before its preemption are under way: they will be its own."""
        if request.status not in _READY or request.request_id in self._ending:
            return False
        return bool(request.drop_stale_output or not request.num_stale_output_tokens)

    def _arrive(self, request: Any) -> Record | None:
        try:
            return self.accounts.arrive(request)
        except BlockPoolError as error:
            self._refuse(request, str(error), too_large=isinstance(error, NeverFits))
            return None

    def _offer(self, record: Record, *, preempt: bool = False, idle: bool = False) -> bool:
        answer = self.accounts.offer(record, preempt=preempt, idle=idle)
        if isinstance(answer, Admitted):
            self._preempt(answer.preempted)
            return True
        if isinstance(answer, Ended):
            if not record.account.started:
                log.warning("cacheaware: request %s ends without tokens: %s", record.account.id, answer.why)
            self._finish(record.request, RequestStatus.FINISHED_LENGTH_CAPPED)
        return False

    # -- ends and preemptions -----------------------------------------------------------------------------------------

    def _preempt(self, accounts: Iterable[Request]) -> None:
        """The pool has made them wait again: so does vLLM."""
        for account in accounts:
            record = self.accounts.of(account.id)
            if record is None:
                continue
            request = record.request
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
            else:
                self.accounts.lost(record)  # let in, and not started yet

    def _end(self, record: Record) -> None:
        """No block will come: it ends with `length`, after the tokens that are being computed."""
        request = record.request
        under_way = request.num_output_placeholders
        most = request.num_output_tokens + under_way
        least = getattr(request.sampling_params, "min_tokens", 0)
        if under_way and least <= most:
            request.max_tokens = most
            record.ending = True
        else:
            self._finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    def _refuse(self, request: Any, why: str, *, too_large: bool = False) -> None:
        log.warning("cacheaware: request %s is refused: %s", request.request_id, why)
        status = RequestStatus.FINISHED_LENGTH_CAPPED if too_large else RequestStatus.FINISHED_ERROR
        self._finish(request, status)

    def _finish(self, request: Any, status: Any) -> None:
        if self._in_step:
            self._ending[request.request_id] = (request, status)
            return
        if self.finish_requests(request.request_id, status):
            self._over.append(request)

    # -- vLLM's blocks ------------------------------------------------------------------------------------------------

    def _get_computed_blocks(self, original: Any, request: Any) -> Any:
        """What it hits was decided when it was let in, and is held for it."""
        record = self.accounts.of(request.request_id)
        if record is None or not record.running:
            return original(request)
        record.taken = record.hits
        manager = self.kv_cache_manager
        blocks = [manager.block_pool.blocks[block + NULL_BLOCKS] for block in record.table[: record.hits]]
        return manager.create_kv_cache_blocks((blocks,)), record.hits * self.block_size, 0

    def _allocate_slots(self, original: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """All that the step needs is in its table already; what vLLM takes is taken for this request."""
        self._served = request
        return original(request, num_new_tokens, *args, **kwargs)

    def _take(self, count: int) -> list[Any]:
        assert self._served is not None, "vLLM takes blocks for nobody"
        record = self.accounts.of(self._served.request_id)
        assert record is not None, "vLLM takes blocks for a request that is not known"
        return list(self.accounts.take(record, count))

    def _cache_full_blocks(self, original: Any, request: Any, blocks: Any, *args: Any, **kwargs: Any) -> None:
        original(request, blocks, *args, **kwargs)
        record = self.accounts.of(request.request_id)
        if record is None or not record.running:
            return
        names = ("num_cached_blocks", "num_full_blocks")
        first, end = (kwargs[name] if name in kwargs else args[place] for place, name in enumerate(names))
        pool = self.kv_cache_manager.block_pool
        equals = self.accounts.fill(record, first, end)
        if equals:
            pool.touch([pool.blocks[block + NULL_BLOCKS] for block in equals])

    def _free(self, original: Any, request: Any) -> None:
        record = self.accounts.of(request.request_id)
        original(request)
        if record is None:
            return
        if record.equals:
            pool = self.kv_cache_manager.block_pool
            pool.free_blocks([pool.blocks[block + NULL_BLOCKS] for block in reversed(record.equals)])
        if request.is_finished():
            self.accounts.finish(request.request_id)
        else:
            self.accounts.lost(record)


def _bytes_per_token(config: Any, block_size: int) -> int:
    """Of all layers; as vLLM says how large a block is in each."""
    group = config.kv_cache_groups[0]
    return int(group.kv_cache_spec.page_size_bytes * len(group.layer_names) // block_size)
