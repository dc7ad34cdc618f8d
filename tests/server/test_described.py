"""The interface as programs read it, against what the server does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvquilt.server.asked import ABSENT
from tests.server.running import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def test_every_body_says_what_it_holds(served: Served) -> None:
    told = served.http().get("/openapi.json").json()
    posts = {path: each["post"] for path, each in told["paths"].items() if "post" in each}
    assert set(posts) == {"/v1/chat/completions", "/v1/completions", "/v1/documents", "/tokenize"}
    for each in posts.values():
        (schema, *_) = each["requestBody"]["content"].values()
        for ref in [schema["schema"], *schema["schema"].get("anyOf", [])]:
            if "$ref" in ref:
                assert ref["$ref"].rpartition("/")[2] in told["components"]["schemas"]


def test_nothing_points_nowhere(served: Served) -> None:
    told = served.http().get("/openapi.json")
    names = {ref.partition('"')[0] for ref in told.text.replace(" ", "").split('"$ref":"#/components/schemas/')[1:]}
    assert names
    assert names <= set(told.json()["components"]["schemas"])


def test_a_failure_is_what_is_told(served: Served) -> None:
    told = served.http().get("/openapi.json").json()
    error = told["components"]["schemas"]["Error"]["properties"]["error"]
    answer = served.http().post("/v1/completions", json={"prompt": 7})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == set(error["required"])
    assert "422" not in str(told["paths"])


def test_a_field_that_must_be_neutral_is_not_offered(served: Served) -> None:
    told = served.http().get("/openapi.json").json()
    assert not set(ABSENT) & set(told["components"]["schemas"]["ChatAsked"]["properties"])


def test_every_code_of_an_error_stands_on_the_page() -> None:
    root = Path(__file__).parents[2]
    source = "".join(path.read_text(encoding="utf-8") for path in (root / "src/kvquilt/server").glob("*.py"))
    codes = set(re.findall(r'RefusalError\([^"]*?\d{3}[^"]*?, "([a-z_0-9]+)"', source))
    assert {"invalid_api_key", "queue_full", "deadline_exceeded"} <= codes
    table = (root / "docs/server.md").read_text(encoding="utf-8").partition("## Errors")[2]
    assert codes <= set(re.findall(r"`([a-z_0-9]+)`", table))
