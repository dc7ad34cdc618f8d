"""Ids in paths: each names its own document, whatever characters it has."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from kvquilt.server.limits import Limits
from tests.server.running import serving

IDS = [
    "a", "a\n", "a\nb", "a\r\n", "\na", "a/", "a/b", "a//b", "/a", "../a", "%2F", "a?b#c", "a b", "a+b", "e\u0301",
    "\u00e9", "a\u2028", "public", "x" * 512,
]  # fmt: skip


def test_every_id_names_its_own_document(tmp_path: Path) -> None:
    with serving(Limits(), tmp_path) as served:
        http = served.http()
        documents = [{"id": id, "text": f"The text of number {n}."} for n, id in enumerate(IDS)]
        assert http.post("/v1/documents", json={"documents": documents}).status_code == 202
        for id in IDS:
            assert http.get(f"/v1/documents/{quote(id, safe='')}").json()["id"] == id
        for n, id in enumerate(IDS):
            gone = http.delete(f"/v1/documents/{quote(id, safe='')}")
            assert gone.json() == {"id": id, "object": "document.deleted", "deleted": True}
            left = {each["id"] for each in http.get("/v1/documents").json()["data"]}
            assert left == set(IDS[n + 1 :])


def test_one_that_is_gone_is_no_place_to_go_on_behind(tmp_path: Path) -> None:
    with serving(Limits(), tmp_path) as served:
        http = served.http()
        documents = [{"id": id, "text": f"The text of {id}."} for id in ("a", "b", "c")]
        http.post("/v1/documents", json={"documents": documents})
        page = http.get("/v1/documents?limit=1&after=a").json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (["b"], True)
        assert http.get("/v1/documents?after=c").json() == {"object": "list", "data": [], "has_more": False}
        http.delete("/v1/documents/a")
        told = http.get("/v1/documents?limit=1&after=a")
        assert (told.status_code, told.json()["error"]["param"]) == (404, "after")


def test_a_slash_too_many_sends_nobody_elsewhere(tmp_path: Path) -> None:
    # a redirect names the host and the scheme that the request had here, behind a proxy not those of the client
    with serving(Limits(), tmp_path) as served:
        http = served.http()
        for method, path in (("POST", "/v1/completions/"), ("GET", "/v1/documents/"), ("GET", "/health/")):
            told = http.request(method, path, headers={"host": "elsewhere.example"}, follow_redirects=False)
            assert (told.status_code, "location" in told.headers) in ((404, False), (403, False))
            assert "error" in told.json()
