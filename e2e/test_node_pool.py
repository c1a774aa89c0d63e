"""One pool in containers on a real node: it serves, edits reach it live, and nobody gets more than is theirs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from e2e.serving import CONTROL, MODEL, Callers, ServingSpace, call, key_entry, pod_url, question
from e2e.space import DEPLOYMENT, POOL

KEYS = "/api/v1/{}/secrets/keys"


def test_a_pool_that_is_applied_becomes_ready_and_answers_through_its_service(chat: ServingSpace) -> None:
    assert len(chat.ready_pods()) == 2
    with chat.client() as client:
        assert [model.id for model in client.models.list().data] == [MODEL]
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=8
        )
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_every_condition_is_what_it_is_on_a_healthy_pool(chat: ServingSpace) -> None:
    chat.wait("the pool is settled", chat.settled)
    assert chat.condition("Ready") == ("True", "AllReplicasReady"), chat.story()
    assert (chat.condition("QuotaEnforced") or ("",))[0] == "True", chat.story()
    assert (chat.condition("IdentityEnforced") or ("",))[0] == "True", chat.story()


def test_an_edited_quota_reaches_the_engines_of_pods_that_run_on(chat: ServingSpace) -> None:
    before, generation = chat.restarts(), chat.get(DEPLOYMENT)["metadata"]["generation"]
    tiers = chat.get(POOL)["spec"]["tiers"]
    tiers[0]["quota"]["nominalPercent"] = 60
    edited = chat.patch(POOL, {"spec": {"tiers": tiers}})["metadata"]["generation"]

    def gold_blocks(pod: Any) -> float:
        status = chat.status_of(pod)
        gold = status["ledger"]["tiers"]["gold"]
        return float(gold["nominal"] / status["capacity"])

    chat.wait("both engines have the new quota", lambda: all(abs(gold_blocks(p) - 0.6) < 0.01 for p in chat.pods()))
    chat.wait(
        "the status says so",
        lambda: {tier["name"]: tier for tier in chat.get(POOL)["status"]["tiers"]}["gold"]["nominalPercent"] == 60,
    )
    chat.wait("the edit is done", lambda: chat.get(POOL)["status"]["observedGeneration"] == edited and chat.settled())
    assert chat.restarts() == before
    assert chat.get(DEPLOYMENT)["metadata"]["generation"] == generation


class TestCallers:
    @pytest.mark.parametrize("token", [None, "wrong", "gold-key"], ids=["none", "a wrong one", "a caller's key"])
    @pytest.mark.parametrize("path", ["/pool/status", "/pool/explain"])
    def test_the_control_side_wants_its_token(self, chat: ServingSpace, path: str, token: str | None) -> None:
        for pod in chat.pods():
            assert call(pod_url(pod, CONTROL), path, token)[0] == 401

    def test_the_control_side_can_be_neither_drained_nor_told_a_view_without_it(self, chat: ServingSpace) -> None:
        pod = chat.pods()[0]
        assert call(pod_url(pod, CONTROL), "/pool/drain", "wrong", body={})[0] == 401
        assert call(pod_url(pod), "/healthz")[0] == 200
        assert call(pod_url(pod), "/v1/chat/completions", "gold-key", question())[0] == 200

    def test_the_engine_is_reached_by_nobody_but_its_sidecar(self, chat: ServingSpace) -> None:
        with pytest.raises(ConnectionRefusedError):
            call(pod_url(chat.pods()[0], 8001), "/health")

    @pytest.mark.parametrize("key", [pytest.param(None, id="no key"), pytest.param("nobody's", id="an unknown key")])
    def test_who_is_not_known_is_not_served(self, chat: ServingSpace, key: str | None) -> None:
        assert call(chat.service_url(), "/v1/chat/completions", key, question())[0] == 401

    def test_a_tier_that_is_not_the_callers_is_refused(self, chat: ServingSpace) -> None:
        status, body = call(chat.service_url(), "/v1/chat/completions", "bronze-key", question(service_tier="gold"))
        assert status in (400, 403), body
        assert "gold" in body["error"]["message"]

    def test_what_a_client_says_of_tier_and_priority_is_dropped(self, chat: ServingSpace) -> None:
        pod = chat.pods()[0]
        asked = question(priority=-100, vllm_xargs={"cacheaware_tier": "gold"})
        assert call(pod_url(pod), "/v1/chat/completions", "bronze-key", asked)[0] == 200
        token = chat.internal("control-token")
        _, explained = call(pod_url(pod, CONTROL), "/pool/explain?n=1", token)
        assert explained["decisions"][-1]["tier"] == "bronze"

    def test_a_salt_that_a_client_sends_opens_nobody_elses_cache(self, chat: ServingSpace) -> None:
        pod = chat.pods()[0]
        asked = question(words=300, cache_salt="the same")

        def cached(key: str, **fields: Any) -> int:
            status, body = call(pod_url(pod), "/v1/chat/completions", key, asked | fields)
            assert status == 200, body
            return int((body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

        assert cached("gold-key") == 0
        assert cached("bronze-key") == 0, "another tenant's blocks were hit"
        assert cached("gold-key", cache_salt="another") > 0, "the salt is the server's, whatever the client sends"

    def test_keys_are_changed_by_editing_the_secret_and_no_request_is_dropped(self, chat: ServingSpace) -> None:
        before = chat.restarts()
        with Callers(chat.service_url()) as callers:
            chat.patch(KEYS, {"stringData": {"gold-next": key_entry("next-key", "gold")}})
            chat.wait("the new key works on every pod", lambda: all(_knows(pod, "next-key") for pod in chat.pods()), 90)
            callers.key = "next-key"
            answered = callers.answered
            chat.wait("callers use the new key", lambda: callers.answered > answered + 4)
            chat.patch(KEYS, {"data": {"gold": None}})
            chat.wait("the old key is refused", lambda: not any(_knows(pod, "gold-key") for pod in chat.pods()), 90)
        assert callers.failures == []
        assert chat.restarts() == before
        chat.patch(KEYS, {"stringData": {"gold": key_entry("gold-key", "gold")}})
        chat.wait("the old key is back", lambda: all(_knows(pod, "gold-key") for pod in chat.pods()), 90)

    def test_the_control_token_is_changed_by_editing_the_internal_secret(self, chat: ServingSpace) -> None:
        """Its first line counts, older ones are still accepted: so nobody is locked out while it spreads."""
        old = chat.internal("control-token")
        secret = "/api/v1/{}/secrets/chat-internal"
        chat.patch(secret, {"stringData": {"control-token": f"new-token\n{old}"}})
        pods = chat.pods()
        chat.wait("both tokens are accepted", lambda: all(_controls(pod, "new-token") for pod in pods), 90)
        assert all(_controls(pod, old) for pod in pods)
        chat.patch(secret, {"stringData": {"control-token": "new-token"}})
        chat.wait("the old one is refused", lambda: not any(_controls(pod, old) for pod in pods), 90)
        edited = chat.patch(POOL, {"spec": {"defaultTier": "gold"}})["metadata"]["generation"]
        chat.wait(
            "an edit is applied with the new one", lambda: chat.get(POOL)["status"]["observedGeneration"] == edited
        )
        chat.wait("the pool is settled", lambda: chat.settled() and (chat.condition("Ready") or ("",))[0] == "True")


def _knows(pod: Any, key: str) -> bool:
    return call(pod_url(pod), "/v1/chat/completions", key, question())[0] == 200


def _controls(pod: Any, token: str) -> bool:
    return call(pod_url(pod, CONTROL), "/pool/status", token)[0] == 200


def test_no_key_or_token_is_in_a_log(chat: ServingSpace) -> None:
    logs = chat.kubectl("logs", "--selector=app.kubernetes.io/name=cacheaware", "--all-containers", "--tail=-1")
    assert logs
    for text in ("gold-key", "bronze-key", chat.internal("control-token"), chat.internal("salt-key")):
        assert text not in logs
    assert all(json.loads(line) for line in logs.splitlines() if line.startswith("{"))
