"""The lines that tell how to talk to a pool that has just started. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from cacheaware_api.wire import IdentityType
from cacheaware_operator.commands import ReplicaPlace
from cacheaware_operator.plan import Wanted

QUESTION = "What is the capital of France?"


def lines(wanted: Wanted, replicas: Sequence[ReplicaPlace]) -> Iterator[str]:
    tiers = ", ".join(tier.name for tier in wanted.spec.tiers)
    yield f"Pool {wanted.namespace}/{wanted.name} is ready: tiers {tiers}."
    for replica in replicas:
        yield f"  {replica.name}  {replica.url}/v1"
    if not replicas:
        yield "  It has no replicas; set spec.replicas and save the file."
        return
    url = f"{replicas[0].url}/v1"
    yield ""
    yield f"  {_curl(wanted, url)}"
    yield ""
    yield f"  {_python(wanted, url)}"
    yield ""
    if wanted.spec.identity.type is IdentityType.API_KEYS:
        names = ", ".join(key.name for key in wanted.api_keys.keys)
        yield f"  API_KEY is one of the keys whose hashes are in the file ({names or 'none yet'})."
    if wanted.spec.identity.type is IdentityType.TRUSTED_HEADERS:
        names = ", ".join(gateway.name for gateway in wanted.api_keys.gateways)
        yield f"  GATEWAY_SECRET is one of the gateways' secrets in the file ({names or 'none yet'})."
    yield "Edits of the file apply while it runs; `cacheaware status` shows the pool; Ctrl-C stops it."


def _body(wanted: Wanted) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": wanted.spec.model.name,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
    }
    if tier := _tier_to_name(wanted):
        body["service_tier"] = tier
    return body


def _tier_to_name(wanted: Wanted) -> str | None:
    """A tier for the example, where a request without one would be refused."""
    if wanted.spec.default_tier is not None:
        return None
    if wanted.spec.identity.type is IdentityType.API_KEYS and all(key.default_tier for key in wanted.api_keys.keys):
        return None
    if wanted.spec.identity.type is IdentityType.TRUSTED_HEADERS:
        return None  # the gateway names it
    return wanted.spec.tiers[0].name


def _headers(wanted: Wanted) -> dict[str, str]:
    """What a gateway sends, with the variable that has its secret in braces."""
    if wanted.spec.identity.type is not IdentityType.TRUSTED_HEADERS:
        return {}
    tier = wanted.spec.default_tier or wanted.spec.tiers[0].name
    return {
        "x-cacheaware-gateway-secret": "{GATEWAY_SECRET}",
        "x-cacheaware-tenant": "acme",
        "x-cacheaware-tier": tier,
    }


def _curl(wanted: Wanted, url: str) -> str:
    key = ' -H "Authorization: Bearer $API_KEY"' if wanted.spec.identity.type is IdentityType.API_KEYS else ""
    for name, value in _headers(wanted).items():
        key += f' -H "{name}: {value.replace("{", "${")}"'
    body = shlex.quote(json.dumps(_body(wanted)))
    return f"curl {url}/chat/completions -H 'Content-Type: application/json'{key} -d {body}"


def _python(wanted: Wanted, url: str) -> str:
    key = 'os.environ["API_KEY"]' if wanted.spec.identity.type is IdentityType.API_KEYS else '"none"'
    arguments = ", ".join(f"{name}={value!r}" for name, value in _body(wanted).items())
    if headers := _headers(wanted):
        written = repr(headers).replace("'{GATEWAY_SECRET}'", 'os.environ["GATEWAY_SECRET"]')
        arguments += f", extra_headers={written}"
    return f'OpenAI(base_url="{url}", api_key={key}).chat.completions.create({arguments})'
