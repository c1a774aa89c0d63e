"""The OpenAPI description of :8000 says what the code does: its routes, its bounds, its reasons, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from cacheaware_sidecar.app import create_app
from cacheaware_sidecar.errors import BadRequest, Reason
from cacheaware_sidecar.limits import BOUNDS
from cacheaware_sidecar.openapi import CHAT, COMPLETIONS, RESPONSES, description
from cacheaware_sidecar.responses_request import REFUSED
from cacheaware_sidecar.rewrite import PRIVATE, asked_of
from cacheaware_sidecar.testing_sidecar import Running


def operations(document: Any) -> set[tuple[str, str]]:
    return {(path, method) for path, item in document["paths"].items() for method in item}


def fields(path: str) -> Any:
    """The properties of a request's body."""
    body = description()["paths"][path]["post"]["requestBody"]
    return body["content"]["application/json"]["schema"]["properties"]


async def test_it_is_served_to_anybody_and_has_every_route_and_no_other(sidecar: Running) -> None:
    async with sidecar.client.get(f"{sidecar.url}/openapi.json", headers={"Authorization": "Bearer wrong"}) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        document = await answer.json()
    assert document == description()
    parts = sidecar.sidecar
    app = create_app(
        parts.proxy, parts.link.state, parts.gate, parts.traffic, parts.metrics, sidecar.client, "http://unused"
    )
    routes = {
        (route.resource.canonical, route.method.lower())
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert operations(document) == routes


def test_every_path_that_asks_for_a_key_says_so() -> None:
    open_paths = {
        path
        for path, item in description()["paths"].items()
        for operation in item.values()
        if operation.get("security") == [{}]
    }
    assert open_paths == {"/health", "/readyz", "/healthz", "/metrics", "/openapi.json"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_number_that_is_checked_is_described(path: str) -> None:
    assert set(BOUNDS) | {"logprobs"} <= fields(path).keys()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", BOUNDS)
def test_its_bounds_are_those_that_are_checked(path: str, name: str) -> None:
    schema = fields(path)[name]
    most = schema["maximum"]
    asked_of({name: most}, 0)
    with pytest.raises(BadRequest):
        asked_of({name: most + 1}, 0)
    with pytest.raises(BadRequest):
        asked_of({name: schema["exclusiveMinimum"] if "exclusiveMinimum" in schema else schema["minimum"] - 1}, 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_what_the_pool_decides_is_told(path: str) -> None:
    assert set(PRIVATE) <= fields(path).keys()


def test_what_responses_refuse_is_told() -> None:
    assert set(REFUSED) <= fields(RESPONSES).keys()


def test_every_refusal_has_a_reason_of_the_closed_set() -> None:
    for item in description()["paths"].values():
        for operation in item.values():
            for status, answer in operation["responses"].items():
                if "headers" in answer and status != "200":
                    assert answer["headers"]["x-cacheaware-reason"]["schema"]["enum"] == sorted(map(str, Reason))
