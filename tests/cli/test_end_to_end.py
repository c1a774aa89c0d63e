"""`cacheaware up` with the real engine and the real sidecar, on a tiny random model."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from cacheaware.__main__ import app
from cacheaware.testing import DEADLINE, POOL, UpProcess, all_gone, nobody_listens

pytest.importorskip("torch", reason="needs the engine extra")

REAL_UP = """
import sys
from cacheaware.__main__ import app
file, port = sys.argv[1:]
app(["up", "-f", file, "--port", port, "--log-dir", file + ".logs"])
"""
MESSAGES: Any = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 5}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cacheaware_engine.testing import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@pytest.fixture
def real_pool(tmp_path: Path, model: Path) -> Path:
    file = tmp_path / "pool.yaml"
    file.write_text(
        POOL.replace("file:///models/tiny", f"file://{model}").replace(
            "{type: Torch}", "{type: Torch, args: [--threads=1], kvCache: {memory: 16Mi}}"
        )
    )
    return file


@pytest.fixture
def run_real_up(state_home: Path, environment: dict[str, str]) -> Iterator[Callable[[Path], UpProcess]]:
    started: list[UpProcess] = []

    def start(file: Path) -> UpProcess:
        started.append(UpProcess(file, environment, state_home, code=REAL_UP))
        return started[-1]

    yield start
    for up in started:
        up.clean_up()


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_pool_from_its_first_answer_to_its_end(
    run_real_up: Callable[[Path], UpProcess], real_pool: Path, environment: dict[str, str]
) -> None:
    up = run_real_up(real_pool)
    state = up.ready()
    (replica,) = state.replicas
    client = openai.OpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)

    # it answers, and the second time it finds the prompt in the cache
    def chat(**options: Any) -> Any:
        return client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, **options)

    first, second = chat(), chat()
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert [each.id for each in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="gold"):
        chat(service_tier="platinum")

    # what would happen to the same request now
    body = json.dumps({"model": "tiny", "messages": MESSAGES})
    asked = CliRunner(env=environment).invoke(app, ["explain", "chat", "--request", "-", "--lines"], input=body)
    assert asked.exit_code == 0, asked.output
    foreseen = json.loads(asked.stdout)
    assert (foreseen["course"], foreseen["tier"], foreseen["tierBy"]) == ("go", "bronze", "defaultTier")

    # its status is what the engine's ledger says
    def status() -> dict[str, Any]:
        result = CliRunner(env=environment).invoke(app, ["status", "chat", "-o", "json"])
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout)["status"])

    before = status()
    tiers = {tier["name"]: tier for tier in before["tiers"]}
    assert before["capacity"]["minBlocks"] > 0
    assert tiers["bronze"]["cachedBlocks"] > 0
    assert tiers["bronze"]["hitPercent"] > 0
    assert {each["type"]: each["status"] for each in before["conditions"]}["QuotaEnforced"] == "True"

    # a quota changes live: the engine has the new one and is the same process
    edit(real_pool, "nominalPercent: 50", "nominalPercent: 20")
    up.expect("Changed: spec.tiers[gold].quota.nominalPercent: 50 → 20")
    up.expect("Applied: revision 2, acknowledged by 1 engine")
    assert up.pids() == [part.pid for part in state.parts]
    assert status()["revision"] == 2
    assert chat().usage.prompt_tokens_details.cached_tokens > 0  # and so is the cache

    # the engine is killed in the middle of a stream: a clean error, and the pool recovers with the quotas it had
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    (engine,) = [part.pid for part in up.state().parts if part.name == "engine" and part.pid is not None]
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    with pytest.raises(openai.InternalServerError):
        chat()
    up.expect("the engine ended (killed by SIGKILL)")
    up.expect("the engine is ready again")
    up.until(lambda state: state.status is not None and "AllReplicasReady" in json.dumps(state.status))
    assert chat().choices[0].message.content == first.choices[0].message.content
    after = status()
    assert after["revision"] == 2
    assert after["readyReplicas"] == 1

    # asked to end it lets a stream finish, and leaves nothing
    pids = up.pids()
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    events = iter(stream)
    next(events)
    up.send(signal.SIGINT)
    up.expect("Stopping")
    *_, last = events
    assert last.choices[0].finish_reason == "length"
    client.close()
    code, _ = up.end()
    assert code == 0
    assert all_gone(pids)
    assert nobody_listens(replica.url)
    assert nobody_listens(replica.control_url)
    assert nobody_listens(replica.engine_url)
    assert not Path(state.folder).exists()
    assert not list((up.state_home / "cacheaware").glob("*.json"))


def test_quotas_that_an_engine_refuses_are_told_and_the_old_ones_stay(
    run_real_up: Callable[[Path], UpProcess], real_pool: Path
) -> None:
    edit(real_pool, "[--threads=1]", "[--threads=1, --max-num-seqs=2]")
    up = run_real_up(real_pool)
    up.ready()
    edit(real_pool, "  defaultTier:", "  - {name: silver, quota: {nominalPercent: 10}}\n  defaultTier:")
    assert "--max-num-seqs" in up.expect("Not in force: chat-0: ")
    edit(real_pool, "  - {name: silver, quota: {nominalPercent: 10}}\n", "")
    up.expect("Changed: spec.tiers[silver]: present → absent")
    up.expect("Applied: revision 3, acknowledged by 1 engine")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        pytest.param("memory: 16Mi", "memory: 900Ti", "memory", id="more memory than the machine has"),
        pytest.param(
            "{name: tiny, ", "{name: tiny, maxModelLen: 99999, ", "99999", id="context longer than the model's"
        ),
        pytest.param("[--threads=1]", "[--max-num-seqs=many]", "--max-num-seqs", id="bad value of a flag"),
    ],
)
def test_an_engine_that_cannot_start_is_told_by_its_own_reason(
    run_real_up: Callable[[Path], UpProcess], real_pool: Path, old: str, new: str, words: str
) -> None:
    edit(real_pool, old, new)
    up = run_real_up(real_pool)
    code, said = up.end()
    assert code == 1
    assert "the engine of chat-0 ended (exit code" in said
    assert words in said.split("the engine of chat-0 ended")[1]
    log = Path(f"{real_pool}.logs") / "chat-0-engine.log"
    assert f"Its whole output: {log}" in said
    assert words in log.read_text()
    assert not list((up.state_home / "cacheaware").glob("*.json"))


def test_a_missing_model_is_named_before_anything_starts(
    run_real_up: Callable[[Path], UpProcess], real_pool: Path, model: Path
) -> None:
    edit(real_pool, f"file://{model}", "file:///nowhere/at/all")
    code, said = run_real_up(real_pool).end()
    assert code == 1
    assert "spec.model.source: there is no model at /nowhere/at/all" in said


OLD, NEW = "old-secret-of-the-gateway-0123456789", "new-secret-of-the-gateway-0123456789"


def test_behind_a_gateway_tier_and_tenant_are_its_word_and_its_secret_is_exchanged_live(
    run_real_up: Callable[[Path], UpProcess], real_pool: Path
) -> None:
    edit(real_pool, "{type: Open}", "{type: TrustedHeaders, trustedHeaders: {secretRef: {name: gateway}}}")
    secret = "---\napiVersion: v1\nkind: Secret\nmetadata: {name: gateway}\nstringData:\n"
    real_pool.write_text(f"{real_pool.read_text()}{secret}  old: {OLD}\n")
    up = run_real_up(real_pool)
    (replica,) = up.ready().replicas
    client = openai.OpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)

    def chat(proof: str, tenant: str = "acme") -> Any:
        headers = {"x-cacheaware-gateway-secret": proof, "x-cacheaware-tenant": tenant, "x-cacheaware-tier": "gold"}
        answer = client.chat.completions.with_raw_response.create(
            model="tiny", messages=MESSAGES, max_tokens=2, extra_headers=headers
        )
        assert answer.headers["x-cacheaware-tier"] == "gold"
        return answer.parse()

    def hits(answer: Any) -> int:
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert [hits(chat(OLD)), hits(chat(OLD, "zeta"))] == [0, 0]  # each tenant has a cache of its own
    assert hits(chat(OLD)) > 0
    with pytest.raises(openai.AuthenticationError, match="gateway"):
        chat(NEW)
    edit(real_pool, f"  old: {OLD}\n", f"  old: {OLD}\n  new: {NEW}\n")
    up.expect("Changed: gateway new: added")
    up.expect("Applied")
    for _ in range(200):  # the sidecar looks at its files now and then
        try:
            assert hits(chat(NEW)) > 0
            break
        except openai.AuthenticationError:
            time.sleep(0.05)
    else:
        pytest.fail("the new secret was never accepted")
    assert hits(chat(OLD)) > 0
