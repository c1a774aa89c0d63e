"""The lines that tell how to ask a new pool can be used as they stand."""

import hashlib
import json
import shlex
from pathlib import Path

import pytest

from cacheaware import quick_start
from cacheaware.testing import POOL
from cacheaware_api.objects import read_pool_file
from cacheaware_operator.commands import ReplicaPlace
from cacheaware_operator.plan import Wanted

KEYS = (
    POOL.replace("{type: Open}", "{type: APIKeys, apiKeys: {secretRef: {name: keys}}}")
    + f"""\
---
apiVersion: v1
kind: Secret
metadata: {{name: keys}}
stringData:
  alice: '{{sha256: {hashlib.sha256(b"a").hexdigest()}, tenant: acme, tiers: [gold]}}'
"""
)

GATEWAY = (
    POOL.replace("{type: Open}", "{type: TrustedHeaders, trustedHeaders: {secretRef: {name: gateway}}}")
    + f"""\
---
apiVersion: v1
kind: Secret
metadata: {{name: gateway}}
stringData: {{main: {"n" * 32}}}
"""
)


def lines(text: str, replicas: int = 1) -> list[str]:
    wanted = Wanted.from_file(read_pool_file(text.encode()), uid="uid-1", generation=1)
    nowhere = Path("/nowhere")
    places = [
        ReplicaPlace(f"chat-{number}", 8000 + number, 1, 2, nowhere, nowhere, nowhere) for number in range(replicas)
    ]
    return list(quick_start.lines(wanted, places))


def the_curl(text: str) -> list[str]:
    (line,) = [line for line in lines(text) if "curl" in line]
    return shlex.split(line)


def test_curl_sends_json_that_names_the_model() -> None:
    words = the_curl(POOL)
    assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "tiny"
    assert body["messages"][0]["role"] == "user"
    assert "service_tier" not in body
    assert not any("Authorization" in word for word in words)


def test_a_tier_is_named_where_a_request_without_one_is_refused() -> None:
    words = the_curl(POOL.replace("  defaultTier: bronze\n", ""))
    assert json.loads(words[words.index("-d") + 1])["service_tier"] == "gold"


def test_a_pool_with_keys_shows_where_the_key_goes_and_whose_keys_there_are() -> None:
    said = "\n".join(lines(KEYS))
    assert '-H "Authorization: Bearer $API_KEY"' in said
    assert 'api_key=os.environ["API_KEY"]' in said
    assert "(alice)" in said


def test_a_pool_behind_a_gateway_shows_what_a_gateway_sends() -> None:
    said = "\n".join(lines(GATEWAY))
    assert '-H "x-cacheaware-gateway-secret: ${GATEWAY_SECRET}"' in said
    assert '-H "x-cacheaware-tier: bronze"' in said
    assert "'x-cacheaware-gateway-secret': os.environ[\"GATEWAY_SECRET\"]" in said
    assert "(main)" in said
    assert "n" * 32 not in said


@pytest.mark.parametrize("text", [POOL, KEYS, GATEWAY], ids=["open", "keys", "gateway"])
def test_the_python_line_is_python(text: str) -> None:
    (line,) = [line for line in lines(text) if "OpenAI(" in line]
    compile(line.strip(), "example", "eval")


def test_every_replica_is_listed() -> None:
    said = "\n".join(lines(POOL, replicas=3))
    for port in (8000, 8001, 8002):
        assert f"http://127.0.0.1:{port}/v1" in said


@pytest.mark.parametrize("replicas", [0])
def test_a_pool_without_replicas_says_how_to_get_one(replicas: int) -> None:
    assert "set spec.replicas" in "\n".join(lines(POOL, replicas=replicas))
