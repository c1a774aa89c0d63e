"""`cacheaware explain --trace`: what a pool's file makes of a trace, and which of its lines is why promises break."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cacheaware.explain import PoolLines
from cacheaware.replay.causes import Missed, missed
from cacheaware.replay.command import Inputs, Options, read_or_tell, run
from cacheaware.replay.policies import PolicyName
from cacheaware.replay.simulation import Outcome
from cacheaware.replay.virtual_operator import view_of
from cacheaware_api.quota import quotas_for
from cacheaware_operator.rebalance_terms import terms_of
from cacheaware_sidecar.tiers import promise_of


def main(options: Options, console: Console, errors: Console) -> int:
    inputs = read_or_tell("explain", options, console, errors)
    if inputs is None:
        return 1
    outcome = run(inputs, [PolicyName.CACHEAWARE], errors).of(PolicyName.CACHEAWARE)
    causes = causes_of(inputs, outcome)
    for line in _kept(outcome, causes):
        console.print(line, highlight=False, markup=False)
    if causes:
        console.print(table(causes, PoolLines(options.pool)), highlight=False)
    return 0


def causes_of(inputs: Inputs, outcome: Outcome) -> Sequence[Missed]:
    setup = inputs.setup
    view = view_of(setup.spec, terms_of(setup.spec).nominal)
    promises = {tier.name: promise_of(tier) for tier in view.tiers}
    quotas = quotas_for(view, setup.capacity)
    return missed(outcome.served, promises, quotas, setup.block_size, setup.capacity)


def table(causes: Sequence[Missed], lines: PoolLines) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    shown.add_column("tier", no_wrap=True)
    shown.add_column("missed", justify="right", no_wrap=True)
    shown.add_column("most of the time", overflow="fold")
    shown.add_column("at most", justify="right", no_wrap=True)
    shown.add_column("decided by", overflow="fold")
    for each in causes:
        reason = each.reason
        where = "" if reason.field is None else lines.where(reason.tier, reason.field)
        if reason.tier != each.tier:
            where = f"{where} ({reason.tier})"
        seconds = f"{each.seconds:.2f} s" if each.seconds else ""
        shown.add_row(each.tier, str(each.requests), reason.cause, seconds, where)
    return shown


def _kept(outcome: Outcome, causes: Sequence[Missed]) -> list[str]:
    lines = []
    for name, tier in outcome.tiers.items():
        broken = sum(each.requests for each in causes if each.tier == name)
        lines.append(
            f"{name}: {tier.requests - broken} of {tier.requests} requests got what was promised, "
            f"{tier.hit_percent:.1f} % of their prompt tokens were cached"
        )
    return lines
