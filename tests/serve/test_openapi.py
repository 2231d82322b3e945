"""The API's description."""

from __future__ import annotations

import aiohttp

from serve import HttpServer
from serve.endpoints.openapi import describe_api


async def test_it_is_served_and_names_every_route(server: HttpServer) -> None:
    async with aiohttp.ClientSession(server.url) as session, session.get("/openapi.json") as response:
        document = await response.json()
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert server.app is not None
    app_routes = {
        (route.method, route.resource.canonical)
        for route in server.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert app_routes - described == {("GET", "/openapi.json"), ("GET", "/"), ("GET", "/page/{name}")}
    assert described <= app_routes


def test_every_reference_leads_somewhere() -> None:
    document = describe_api()

    def walk(value: object) -> list[str]:
        if isinstance(value, dict):
            here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return here + [found for item in value.values() for found in walk(item)]
        return [found for item in value for found in walk(item)] if isinstance(value, list) else []

    references = walk(document)
    assert len(references) > 20
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"]
