"""The control side: which view wins, who may say so, and what is told about the last five minutes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_sidecar.figures import Figures, Sample, percentile
from cacheaware_sidecar.metrics import engine_page
from cacheaware_sidecar.secret_files import SecretsError, load_secrets
from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_sidecar import (
    CONTROL_TOKEN,
    Running,
    eventually,
    running_sidecar,
    tier,
    view,
    view_json,
    write_files,
)
from cacheaware_sidecar.view_source import StaleView, ViewRefused, ViewSource, load_view


class TestToken:
    @pytest.mark.parametrize("path", ["/pool/view", "/pool/status", "/pool/explain", "/metrics", "/nowhere"])
    async def test_everything_but_health_needs_it(self, sidecar: Running, path: str) -> None:
        for token in ("", "wrong", CONTROL_TOKEN + "x", CONTROL_TOKEN[:-1]):
            assert (await sidecar.control("GET", path, token=token))[0] == 401
        assert (await sidecar.control("GET", path))[0] != 401

    async def test_health_does_not(self, sidecar: Running) -> None:
        assert (await sidecar.control("GET", "/healthz", token=""))[0] == 200
        assert (await sidecar.control("GET", "/readyz", token=""))[0] == 200

    async def test_a_rotated_token_counts_beside_the_new_one(self, sidecar: Running) -> None:
        (sidecar.secrets_dir / "control-token").write_text(f"new-token\n{CONTROL_TOKEN}\n")
        await eventually(lambda: len(sidecar.sidecar.secrets.control_tokens) == 2)
        assert (await sidecar.control("GET", "/pool/status", token="new-token"))[0] == 200
        assert (await sidecar.control("GET", "/pool/status"))[0] == 200


class TestView:
    def test_the_newer_number_wins_and_a_new_pool_always_does(self) -> None:
        taken: list[wire.View] = []
        source = ViewSource(taken.append)
        assert source.offer(view(2)) is True
        assert source.offer(view(2)) is False
        with pytest.raises(StaleView, match="older than 2"):
            source.offer(view(1))
        with pytest.raises(StaleView, match="other content"):
            source.offer(view(2, defaultTier="gold"))
        assert source.offer(view(3)) is True
        assert source.offer(view(1, uid="pool-2")) is True
        assert [(one.revision.pool_uid, one.revision.number) for one in taken] == [
            ("pool-1", 2),
            ("pool-1", 3),
            ("pool-2", 1),
        ]

    @pytest.mark.parametrize(
        ("changes", "names"),
        [
            pytest.param({"identity": {"type": "Nobody"}}, "identity.type", id="unknown identity"),
            pytest.param({"tiers": []}, "tiers", id="no tier"),
            pytest.param({"tiers": [tier("a"), tier("a")]}, "tiers", id="a tier twice"),
            pytest.param({"tiers": [tier("a\r\nX-B: b")], "defaultTier": None}, "printable", id="a header in a name"),
            pytest.param({"defaultTier": "lead"}, "defaultTier", id="a default that is no tier"),
            pytest.param({"tiers": [tier("a", weight=0)], "defaultTier": "a"}, "weight", id="weight 0"),
            pytest.param({"tiers": [tier("a", ttft="soon")], "defaultTier": "a"}, "sla", id="no duration"),
            pytest.param({"tiers": [tier("a", nominal=101)], "defaultTier": "a"}, "tiers", id="more than all"),
            pytest.param({"tiers": [tier("a", retention="x")], "defaultTier": "a"}, "retention", id="retention"),
            pytest.param({"sharing": "Everyone"}, "sharing", id="unknown sharing"),
            pytest.param({"revision": {"pool_uid": "p"}}, "revision.number", id="no number"),
            pytest.param({"publicPercent": "10"}, "publicPercent", id="a string for a number"),
        ],
    )
    async def test_a_wrong_view_is_400_by_its_field_and_the_old_one_stays(
        self, sidecar: Running, changes: dict[str, Any], names: str
    ) -> None:
        status, said = await sidecar.control("PUT", "/pool/view", view_json(2) | changes)
        assert status == 400
        assert names in said["error"]["message"]
        assert sidecar.sidecar.views.view == view(1)

    async def test_a_view_too_large_or_not_json_is_refused_in_words(self, sidecar: Running) -> None:
        headers = {"Authorization": f"Bearer {CONTROL_TOKEN}"}
        for data, status in ((b" " * 5_000_000, 413), (b"{", 400), (b"[]", 400)):
            async with sidecar.client.put(
                sidecar.control_url + "/pool/view", data=io.BytesIO(data), headers=headers
            ) as answer:
                assert answer.status == status
                assert (await answer.json())["error"]["message"]

    async def test_an_older_view_is_409(self, sidecar: Running) -> None:
        assert (await sidecar.control("PUT", "/pool/view", view_json(5)))[0] == 200
        status, said = await sidecar.control("PUT", "/pool/view", view_json(4))
        assert (status, said["error"]["code"]) == (409, "stale-view")
        assert (await sidecar.control("PUT", "/pool/view", view_json(5)))[0] == 200

    async def test_unknown_fields_of_a_newer_operator_are_ignored(self, sidecar: Running) -> None:
        assert (await sidecar.control("PUT", "/pool/view", view_json(2) | {"weather": "fine"}))[0] == 200

    async def test_the_file_is_read_again_when_it_changes(self, sidecar: Running) -> None:
        sidecar.view_file.write_text("{ half")
        await eventually(lambda: sidecar.sidecar.views.problem is not None)
        assert sidecar.sidecar.views.view == view(1)
        sidecar.view_file.write_text(json.dumps(view_json(7)))
        await eventually(lambda: sidecar.sidecar.views.view == view(7))
        assert sidecar.sidecar.views.problem is None

    async def test_a_file_that_lags_behind_a_put_changes_nothing(self, sidecar: Running) -> None:
        await sidecar.control("PUT", "/pool/view", view_json(9))
        sidecar.view_file.write_text(json.dumps(view_json(8)))
        sidecar.sidecar.views.read_file(sidecar.view_file)
        assert sidecar.sidecar.views.view == view(9)

    @pytest.mark.parametrize(
        ("content", "says"), [(None, "No such file"), ("", "not JSON"), ("[]", "expected an object"), ("{}", "missing")]
    )
    def test_a_file_that_cannot_be_used_is_named(self, folder: Path, content: str | None, says: str) -> None:
        path = folder / "view.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ViewRefused, match=says) as caught:
            load_view(path)
        assert str(path) in str(caught.value)


class TestSecrets:
    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            pytest.param("salt-key", None, "No such file", id="no salt key"),
            pytest.param("salt-key", " \n", "is empty", id="an empty salt key"),
            pytest.param("control-token", None, "No such file", id="no control token"),
            pytest.param("api-keys.json", "{", "is not JSON", id="keys that are no JSON"),
            pytest.param("api-keys.json", '{"keys": [{"name": "a"}]}', r"keys\[0\].sha256", id="no digest"),
            pytest.param(
                "api-keys.json",
                '{"keys": [{"name": "a", "sha256": "secret!", "tenant": "t", "tiers": []}]}',
                "64 hexadecimal",
                id="a key in clear",
            ),
        ],
    )
    def test_what_is_wrong_is_named_and_never_shown(
        self, folder: Path, name: str, content: str | None, says: str
    ) -> None:
        write_files(folder, view_json(), keys={})
        path = folder / "secrets" / name
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(SecretsError, match=says) as caught:
            load_secrets(folder / "secrets")
        assert name in str(caught.value)
        assert "secret!" not in str(caught.value)

    def test_secrets_do_not_print(self, folder: Path) -> None:
        write_files(folder, view_json(), keys={"k": {"tenant": "t", "tiers": []}})
        assert repr(load_secrets(folder / "secrets")) == "Secrets(1 API keys)"


class TestStatus:
    async def test_it_tells_what_is_applied_and_what_was_seen(self, sidecar: Running) -> None:
        for _ in range(3):
            async with sidecar.client.post(
                sidecar.url + "/v1/completions", json={"prompt": "Hi", "stream": True}
            ) as answer:
                await answer.read()
        status, said = await sidecar.control("GET", "/pool/status")
        assert status == 200
        told = wire.from_json(wire.PoolStatus, said)
        assert (told.applied, told.capacity) == (wire.Revision("pool-1", 1), 1000)
        assert told.enforcement is wire.Enforcement.ENGINE
        assert told.key_algorithm == "blake2b-128/chunk-64/v1"
        assert {one.type: one.status for one in told.conditions} == {
            "QuotaEnforced": "True",
            "PublicPrefixesResident": "True",
            "IdentityEnforced": "False",
        }
        bronze = told.tiers["bronze"]
        assert (bronze.queue, bronze.requests, bronze.hit_percent, bronze.attainment_percent) == (0, 3, 64.0, 100.0)
        assert bronze.time_to_first_token_p50 is not None
        assert bronze.time_to_first_token_p95 is not None
        assert told.tiers["gold"] == wire.TierFigures(queue=0, requests=0)

    async def test_explain_gives_the_last_decisions_newest_first(self, sidecar: Running) -> None:
        for name in ("gold", "bronze", "gold"):
            body = {"prompt": "Hi", "service_tier": name}
            async with sidecar.client.post(sidecar.url + "/v1/completions", json=body) as answer:
                await answer.read()
        status, said = await sidecar.control("GET", "/pool/explain?n=2")
        assert status == 200
        decisions = [wire.from_json(wire.Decision, one) for one in said["decisions"]]
        assert [(one.tier, one.outcome, one.flush_reason, one.hit_tokens) for one in decisions] == [
            ("gold", "answered", "not-held", 64),
            ("bronze", "answered", "not-held", 64),
        ]
        assert decisions[0].request_id == answer.headers["x-request-id"]

    @pytest.mark.parametrize("n", ["-1", "x", "1e3", "9" * 99, ""])
    async def test_explain_refuses_a_number_that_is_none(self, sidecar: Running, n: str) -> None:
        assert (await sidecar.control("GET", f"/pool/explain?n={n}"))[0] == 400


class TestFigures:
    def test_only_the_last_five_minutes_count(self) -> None:
        figures = Figures()
        figures.add("gold", Sample(0.0, 100, 0, 9.0, False))
        figures.add("gold", Sample(200.0, 100, 90, 0.5, True))
        figures.add("gold", Sample(250.0, 300, 150, 0.7, None))
        assert figures.of("gold", queue=2, now=301.0) == wire.TierFigures(
            queue=2,
            requests=2,
            hit_percent=60.0,
            time_to_first_token_p50=0.5,
            time_to_first_token_p95=0.7,
            attainment_percent=100.0,
            longest_prompt_tokens=300,
        )

    def test_what_was_not_seen_is_absent_and_not_zero(self) -> None:
        figures = Figures()
        figures.add("gold", Sample(0.0))
        assert figures.of("gold", 0, 1.0) == wire.TierFigures(queue=0, requests=1)

    @pytest.mark.parametrize(
        ("values", "percent", "expected"),
        [([], 95, None), ([1], 50, 1), ([1, 2], 50, 1), ([1, 2, 3], 50, 2), (list(range(1, 101)), 95, 95)],
    )
    def test_a_percentile_is_one_of_the_values(self, values: list[float], percent: float, expected: float) -> None:
        assert percentile(values, percent) == expected


class TestEnginePage:
    @pytest.mark.parametrize(
        ("page", "merged"),
        [
            pytest.param("vllm:num_requests_waiting 2.0\n", "vllm:num_requests_waiting 5.0\n", id="no labels"),
            pytest.param('vllm:num_requests_waiting{a="b"} 0\n', 'vllm:num_requests_waiting{a="b"} 3.0\n', id="labels"),
            pytest.param(
                'vllm:num_requests_waiting{e="0"} 1\nvllm:num_requests_waiting{e="1"} 1\n',
                'vllm:num_requests_waiting{e="0"} 4.0\nvllm:num_requests_waiting{e="1"} 1\n',
                id="two series: ours counts once",
            ),
            pytest.param(
                "vllm:num_requests_waiting_by_reason 1\n", "vllm:num_requests_waiting_by_reason 1\n", id="longer name"
            ),
            pytest.param(
                "# HELP vllm:num_requests_waiting x\n", "# HELP vllm:num_requests_waiting x\n", id="a comment"
            ),
            pytest.param("a 1\n# EOF\n", "a 1\n", id="an end is not the end"),
            pytest.param("a 1", "a 1\n", id="a last line without an end"),
            pytest.param("", "", id="nothing"),
        ],
    )
    def test_only_the_waiting_requests_change(self, page: str, merged: str) -> None:
        assert engine_page(page, queued=3) == merged


async def test_names_of_tenants_and_prompts_are_in_no_metric_and_no_explanation(
    engine: StubEngine, folder: Path
) -> None:
    keys = {"key-of-acme": {"tenant": "tenant-acme", "tiers": ["gold"], "defaultTier": "gold"}}
    async with running_sidecar(engine, folder, wanted=view_json(identity={"type": "APIKeys"}), keys=keys) as sidecar:
        headers = {"Authorization": "Bearer key-of-acme"}
        for body in ({"prompt": "prompt-text"}, {"prompt": "prompt-text", "service_tier": "tier-unknown"}):
            async with sidecar.client.post(sidecar.url + "/v1/completions", json=body, headers=headers) as answer:
                await answer.read()
        _, page = await sidecar.control("GET", "/metrics")
        assert 'cacheaware_requests_total{outcome="answered",tier="gold"} 1.0' in page
        assert 'cacheaware_rejections_total{reason="unknown-tier",tier=""} 1.0' in page
        _, explained = await sidecar.control("GET", "/pool/explain")
        _, status = await sidecar.control("GET", "/pool/status")
        for word in ("tenant-acme", "prompt-text", "tier-unknown", "key-of-acme"):
            assert word not in page
            assert word not in json.dumps([explained, status])
