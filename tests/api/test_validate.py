"""`cacheaware validate`: what it prints, and its exit code."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cacheaware.validate import STDIN, validate
from cacheaware_api.rules import SHARES_WITHIN_100

GOOD = """\
apiVersion: cacheaware.dev/v1alpha1
kind: CacheAwarePool
metadata: {name: chat}
spec:
  model: {name: m, source: pypi://m}
  engine: {type: Torch}
  tiers:
  - name: gold
    quota: {nominalPercent: 60}
  - name: bronze
    quota: {nominalPercent: 30}
  identity: {type: Open}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def run(*paths: Path, stdin: bytes = b"", local: bool = False) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return validate(list(paths), out, err, io.BytesIO(stdin), local=local), out.getvalue(), err.getvalue()


def test_a_good_file_is_ok(good: Path) -> None:
    assert run(good) == (0, f"{good}: OK: pool default/chat with tiers gold, bronze\n", "")


def test_standard_input_is_read_for_a_dash() -> None:
    assert run(STDIN, stdin=GOOD.encode()) == (
        0,
        "standard input: OK: pool default/chat with tiers gold, bronze\n",
        "",
    )


def test_every_problem_of_every_file_is_printed_with_its_line(good: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("60", "80").replace("type: Torch", "type: torch"))
    missing = tmp_path / "missing.yaml"
    code, out, err = run(bad, good, missing)
    assert code == 1
    assert out == f"{good}: OK: pool default/chat with tiers gold, bronze\n"
    assert err.splitlines() == [
        f"{bad}:6: spec.engine.type: must be Torch or VLLM, not 'torch': did you mean Torch?",
        f"{bad}:8: spec.tiers: {SHARES_WITHIN_100}: 80 + 30 = 110: lower them by 10 in all",
        f"{missing}: cannot be read: No such file or directory",
    ]


WITH_KEYS = GOOD.replace("{type: Open}", "{type: APIKeys, apiKeys: {secretRef: {name: chat-keys}}}")


def test_a_secret_that_is_not_in_the_file_is_expected_in_the_cluster(good: Path) -> None:
    good.write_text(WITH_KEYS)
    assert run(good) == (
        0,
        f"{good}: OK: pool default/chat with tiers gold, bronze\n"
        f"{good}: expected in the cluster: Secret chat-keys (spec.identity.apiKeys.secretRef.name)\n",
        "",
    )


def test_for_one_machine_it_must_be_there(good: Path) -> None:
    good.write_text(WITH_KEYS)
    code, out, err = run(good, local=True)
    assert (code, out) == (1, "")
    assert err == f"{good}:12: spec.identity.apiKeys.secretRef.name: Secret chat-keys is not in the file: add it\n"


def test_for_one_machine_nothing_may_be_that_is_not_there(good: Path) -> None:
    assert run(good, local=True)[0] == 0
    good.write_text(GOOD.replace("pypi://m", "pvc://claim/m"))
    assert run(good)[0] == 0
    code, _, err = run(good, local=True)
    assert code == 1
    assert err.startswith(f"{good}: spec.model.source: there are no claims on one machine: ")


@pytest.mark.parametrize("name", ["chat.yaml", "open.yaml", "gpu-vllm.yaml"])
def test_every_sample_is_valid(name: str) -> None:
    code, _, err = run(Path(__file__).parents[2] / "manifests" / "samples" / name)
    assert (code, err) == (0, "")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    code, _, err = run(tmp_path)
    assert (code, err) == (1, f"{tmp_path}: cannot be read: Is a directory\n")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(b"a: 1\nb: \xc3\x28\n")
    assert run(path) == (1, "", f"{path}:2: is not UTF-8: byte 0xc3: save it as UTF-8\n")
