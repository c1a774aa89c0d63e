"""What the documentation promises to cover."""

import re
from pathlib import Path

from cacheaware_api.conditions import ConditionType, Reason

ROOT = Path(__file__).resolve().parents[2]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()


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


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} refers to {target}"
