"""What the documentation promises to cover."""

import re
from pathlib import Path

from cacheaware_api.conditions import ConditionType, Reason
from cacheaware_engine.blocks import BlockPool
from cacheaware_engine.metrics import Metrics as EngineMetrics
from cacheaware_operator.metrics import Metrics as OperatorMetrics
from cacheaware_sidecar.metrics import DroppedLinesCollector, LedgerCollector, WorkingSetCollector
from cacheaware_sidecar.metrics import Metrics as SidecarMetrics

ROOT = Path(__file__).resolve().parents[2]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()


def test_every_reason_that_a_condition_may_give_is_explained() -> None:
    explained = {
        name
        for line in TROUBLESHOOTING.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert explained == {str(reason) for reason in Reason}


def test_every_condition_has_a_section() -> None:
    headings = set(re.findall(r"^## (\w+)$", TROUBLESHOOTING, re.MULTILINE))
    assert headings == {str(type_) for type_ in ConditionType}


def test_every_metric_that_can_be_scraped_is_listed_once() -> None:
    pool = BlockPool(capacity=1, block_size=1, max_sequences=1)
    sidecar = SidecarMetrics(tiers=lambda: (), queued=lambda tier: 0)
    for collector in (
        LedgerCollector(pool.ledger),
        WorkingSetCollector(dict),
        DroppedLinesCollector(lambda: 0),
    ):
        sidecar.registry.register(collector)
    engine = EngineMetrics("model")
    engine.follow(pool.ledger, pool.layout)
    pages = sidecar.page() + engine.exposition() + OperatorMetrics().page()
    scraped = set(re.findall(r"^# TYPE (\S+)", pages.decode(), re.MULTILINE))
    listed = re.findall(r"^\| `((?:cacheaware_|vllm:)\w+)`", METRICS, re.MULTILINE)
    assert sorted(listed) == sorted(name for name in scraped if not name.endswith("_created"))


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} refers to {target}"
