"""The page's files and its numbers, asked for without a browser: policy, caching, who is told what."""

from __future__ import annotations

from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvquilt.identity import namespace
from kvquilt.ledger import DocumentUse, Ledger, Provenance
from kvquilt.server.keyring import Keyring
from kvquilt.server.reuse_counts import ReuseCounts
from tests.server.running import serving
from tests.server.test_access import ask, key_file

NAMES = sorted(each.name for each in files("kvquilt.server").joinpath("page").iterdir())


def test_files_come_with_their_type_a_strict_policy_and_nothing_from_elsewhere() -> None:
    with serving() as served:
        http = served.http()
        for name in NAMES:
            told = http.get("/" if name == "index.html" else f"/page/{name}")
            assert told.status_code == 200
            assert told.content == files("kvquilt.server").joinpath("page", name).read_bytes()
            policy = dict(each.split(" ", 1) for each in told.headers["content-security-policy"].split("; "))
            assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
            assert policy["connect-src"] == "'self'"
            assert "unsafe" not in told.headers["content-security-policy"]
            assert told.headers["x-content-type-options"] == "nosniff"
            assert "set-cookie" not in told.headers
            kind = {"css": "text/css", "js": "text/javascript", "html": "text/html", "svg": "image/svg+xml"}
            assert told.headers["content-type"].split(";")[0] == kind[name.rpartition(".")[2]]
            assert "http" not in told.text.replace('xmlns="http://www.w3.org/2000/svg"', ""), "an address elsewhere"
        page = http.get("/").text
        assert [word for word in ("<style", " style=", " onclick", "javascript:") if word in page] == []


def test_what_goes_wrong_is_announced_and_said_by_the_box_it_is_about() -> None:
    found: list[tuple[str, dict[str, str | None]]] = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, given: found.append((tag, dict(given)))  # type: ignore[method-assign]
    reader.feed(files("kvquilt.server").joinpath("page", "index.html").read_text(encoding="utf-8"))
    errors = [given for _, given in found if "error" in (given.get("class") or "").split()]
    assert {given.get("role") for given in errors} == {"alert"}
    box = next(n for n, (_, given) in enumerate(found) if given.get("id") == "question")
    behind = found[box + 1][1]
    assert behind in errors
    assert behind["id"] in (found[box][1]["aria-describedby"] or "").split()


def test_a_file_that_is_known_is_not_sent_again() -> None:
    with serving() as served:
        http = served.http()
        tag = http.get("/").headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = http.get("/", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert http.get("/", headers={"if-none-match": '"other"'}).status_code == 200
        assert (http.head("/").status_code, http.head("/").content) == (200, b"")


@pytest.mark.parametrize("path", ["/page/none.js", "/page/..%2Fservice.py", "/page/%2e%2e/service.py", "/page/"])
def test_nothing_beside_them_is_given(path: str) -> None:
    with serving() as served:
        told = served.http().get(path)
        assert (told.status_code, told.json()["error"]["code"]) == (404, "unknown_url")


def test_numbers_are_of_the_one_who_asks(tmp_path: Path) -> None:
    ann, bob = key_file(tmp_path / "keys", "ann", "bob")
    with serving(directory=tmp_path / "store", keyring=Keyring(tmp_path / "keys")) as served:
        served.http(ann).post("/v1/documents", json={"id": "hours", "text": "The bakery opens at six."})
        asked = ask(served, ann, "hours")
        served.rests()
        assert served.http().get("/v1/kvquilt/state").status_code == 401
        of_ann, of_bob = (served.http(key).get("/v1/kvquilt/state").json() for key in (ann, bob))
        assert of_ann["answers"] == 1
        assert of_ann["tokens"] == asked.kvquilt["tokens"]
        assert of_ann["sources"] == {"memory": 1}
        assert of_ann["documents"] == {"queued": 0, "compiling": 0, "ready": 1, "failed": 0}
        rows = served.engine.store.ls(namespace("ann"))
        assert of_ann["store"]["disk"] == {"segments": len(rows), "bytes": sum(row.bytes for row in rows)}
        assert of_ann["full_prefill"] == {"measured": 0, "seconds_per_flop": None}
        assert (of_bob["answers"], sum(of_bob["tokens"].values()), of_bob["sources"]) == (0, 0, {})
        assert of_bob["documents"]["ready"] == 0
        assert of_bob["store"]["disk"] == {"segments": 0, "bytes": 0}
        assert "hours" not in str(of_ann), "numbers and no names"


def test_without_keys_numbers_are_this_machines_alone() -> None:
    with serving() as served:
        told = served.http().get("/v1/kvquilt/state", headers={"host": "evil.example"})
        assert (told.status_code, told.json()["error"]["code"]) == (403, "foreign_host")


def test_methods_are_those_that_what_is_loaded_can_run() -> None:
    def names(**options: Any) -> set[str]:
        with serving(**options) as served:
            told = served.http().get("/v1/kvquilt/state").json()
            assert told["method"] == "auto"
            assert told["system"]["text"] == served.engine.template.system
            served.engine.reader.recipe("")
            return {each["name"] for each in told["methods"]}

    without = names()
    assert {"auto", "full", "none", "cacheclip"} <= without, "the tests' engine has a helper model"
    assert not {"kv-packet", "sempic", "encoder"} & without
    assert {"kv-packet", "sempic", "encoder"} <= names(trained=True)


def test_speed_is_that_of_the_last_full_prefills() -> None:
    def ledger(method: str, seconds: float, flops: float) -> Ledger:
        made = Ledger(method=method, flops_full=flops, seconds={"first_token": seconds})
        made.tokens[Provenance.REUSED] = 3
        made.documents.append(DocumentUse("a", 3, 0, Provenance.REUSED, "disk", ""))
        return made

    tally = ReuseCounts()
    tally.add(ledger("none", 9.0, 1.0))
    assert tally.seconds_per_flop is None
    tally.add(ledger("full", 1.0, 1e9))
    tally.add(ledger("full", 3.0, 3e9))
    assert tally.seconds_per_flop == pytest.approx(1e-9)
    assert (tally.answers, tally.tokens["reused"], tally.sources["disk"]) == (3, 9, 3)
    for _ in range(16):
        tally.add(ledger("full", 2.0, 1e9))
    assert tally.seconds_per_flop == pytest.approx(2e-9)
    assert tally.as_dict()["full_prefill"]["measured"] == 16
