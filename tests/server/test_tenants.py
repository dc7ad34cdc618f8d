"""What tenants share and what not: public documents, quotas, and what one can find out of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from kvquilt.errors import InputError
from kvquilt.identity import PUBLIC, namespace
from kvquilt.server import compiler
from kvquilt.server.keyring import Keyring
from kvquilt.server.keys import KeyFile, Role
from kvquilt.server.limits import Limits
from kvquilt.server.shares import Shares
from kvquilt.store import Quotas
from tests.engines import documents
from tests.server.running import MODEL, Served, serving
from tests.waiting import until

TEXTS = [each.text for each in documents(8)]


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.Compiler, "_measure", lambda self, tenant: self._measured.add(tenant))


@contextmanager
def tenants(
    path: Path, quota: int | None = None, limits: Limits | None = None
) -> Iterator[tuple[Served, str, str, str]]:
    """A server with the keys of two tenants and of a publisher."""
    held, _, ann = KeyFile().added("ann")
    held, _, bob = held.added("bob")
    held, _, publisher = held.added(role=Role.PUBLISHER)
    held.write(path / "keys")
    keyring = Keyring(path / "keys")
    shares = None if quota is None else Shares(keyring, quota)
    with serving(limits, path / "store", keyring=keyring, shares=shares) as served:
        yield served, ann, bob, publisher
        served.rests()


def upload(served: Served, key: str, **texts: str) -> Any:
    sent = [{"id": id, "text": text} for id, text in texts.items()]
    return served.http(key).post("/v1/documents", json={"documents": sent})


def ready(served: Served, key: str, *ids: str) -> None:
    for id in ids:
        until(lambda id=id: served.http(key).get(f"/v1/documents/{id}").json().get("state") == "ready")


def ask(served: Served, key: str, *parts: str | dict[str, str]) -> Any:
    """The account of an answer over documents, by id or with their texts."""
    named = [
        {"type": "document", "id": part} if isinstance(part, str) else {"type": "document", **part} for part in parts
    ]
    content: Any = [*named, {"type": "text", "text": "When?"}]
    answer = served.client(key).chat.completions.create(
        model=MODEL, temperature=0, max_tokens=2, messages=[{"role": "user", "content": content}],
        extra_body={"kvquilt": {"method": "none"}},
    )  # fmt: skip
    return answer.kvquilt


def sources(account: Any) -> list[str]:
    return [each["source"] for each in account["documents"]]


def test_a_public_document_is_compiled_once_and_read_by_every_tenant(tmp_path: Path) -> None:
    with tenants(tmp_path) as (served, ann, bob, publisher):
        upload(served, publisher, handbook=TEXTS[0])
        ready(served, ann, "public/handbook")
        for key in (ann, bob):
            upload(served, key, handbook=TEXTS[1])  # one's own of the same name is another
            account = ask(served, key, "handbook", "public/handbook")
            assert [each["id"] for each in account["documents"]] == ["handbook", "public/handbook"]
            assert sources(account)[1] == "memory"
        assert sources(ask(served, publisher, "handbook")) == ["memory"]
        listed = served.http(ann).get("/v1/documents", params={"public": True}).json()
        assert [each["id"] for each in listed["data"]] == ["public/handbook"]
        after = served.http(ann).get("/v1/documents", params={"public": True, "after": "public/handbook"}).json()
        assert after["data"] == []
        assert served.http(ann).get("/v1/documents/public/handbook").json()["id"] == "public/handbook"
        assert [each["id"] for each in served.http(ann).get("/v1/documents").json()["data"]] == ["handbook"]
        tokens = served.engine.store.ls(namespace(PUBLIC))
        assert len(tokens) == 1


def test_the_same_text_of_ones_own_is_compiled_apart_and_says_nothing_of_the_public_one(tmp_path: Path) -> None:
    with tenants(tmp_path) as (served, ann, bob, publisher):
        upload(served, publisher, handbook=TEXTS[0])
        ready(served, ann, "public/handbook")
        assert sources(ask(served, ann, {"text": TEXTS[0]})) == ["compiled"]
        assert sources(ask(served, bob, {"text": TEXTS[0]})) == ["compiled"]


def test_only_a_publishers_key_writes_public_documents(tmp_path: Path) -> None:
    with tenants(tmp_path) as (served, ann, bob, publisher):
        upload(served, publisher, handbook=TEXTS[0])
        ready(served, ann, "public/handbook")
        told = served.http(ann).delete("/v1/documents/public/handbook")
        assert (told.status_code, told.json()["error"]["code"]) == (403, "public_document")
        for sent in ({"id": "public/handbook", "text": "planted"}, {"id": "public/", "text": "planted"}):
            for key in (ann, publisher):
                assert served.http(key).post("/v1/documents", json=sent).status_code == 400
        with pytest.raises(openai.BadRequestError, match="public/"):
            ask(served, ann, {"id": "public/handbook", "text": "planted"})
        assert sources(ask(served, bob, "public/handbook")) == ["memory"]
        assert served.http(publisher).delete("/v1/documents/handbook").status_code == 200
        with pytest.raises(openai.NotFoundError, match="public/handbook"):
            ask(served, ann, "public/handbook")
        assert served.engine.store.ls(namespace(PUBLIC)) == []


def test_public_documents_are_not_there_without_a_publisher() -> None:
    with serving() as served:
        assert served.http().get("/v1/documents/public/a").status_code == 404
        assert served.http().get("/v1/documents", params={"public": True}).json()["data"] == []
        assert served.http().post("/v1/documents", json={"id": "public/a", "text": "planted"}).status_code == 400


def size_of(served: Served, text: str) -> int:
    from kvquilt import Document

    return served.service.compiler.size(Document(text))


def test_what_a_document_is_said_to_take_is_what_it_takes(tmp_path: Path) -> None:
    with tenants(tmp_path, 1 << 30) as (served, ann, *_):
        upload(served, ann, a=TEXTS[0], b=TEXTS[1])
        ready(served, ann, "a", "b")
        kept = sorted(row.bytes for row in served.engine.store.ls(namespace("ann")))
        said = sorted(size_of(served, text) for text in TEXTS[:2])
        assert all(real <= told <= real + 2048 for real, told in zip(kept, said, strict=True))


def test_uploads_beyond_a_quota_are_refused_and_those_within_stay(tmp_path: Path) -> None:
    with tenants(tmp_path, 1 << 30) as (sizing, *_):
        first, second = (size_of(sizing, text) for text in TEXTS[:2])
    with tenants(tmp_path / "new", first + second) as (served, ann, bob, _):
        assert upload(served, ann, a=TEXTS[0], b=TEXTS[1]).status_code == 202
        told = upload(served, ann, c=TEXTS[2])
        assert (told.status_code, told.json()["error"]["code"]) == (413, "quota_exceeded")
        assert "MiB of compiled segments" in told.json()["error"]["message"]
        assert upload(served, ann, a=TEXTS[0]).status_code == 202, "the same again takes nothing"
        ready(served, ann, "a", "b")
        assert sources(ask(served, ann, "a", "b")) == ["memory", "memory"]
        assert upload(served, bob, c=TEXTS[0]).status_code == 202, "another has a quota of its own"
        served.http(ann).delete("/v1/documents/a")
        assert upload(served, ann, c="Short.").status_code == 202


@pytest.mark.parametrize(
    ("limits", "told"), [(Limits(text_bytes=200), "MiB of texts"), (Limits(stored=1), "documents")]
)
def test_texts_have_a_quota_too(tmp_path: Path, limits: Limits, told: str) -> None:
    with tenants(tmp_path, limits=limits) as (served, ann, bob, _):
        assert upload(served, ann, a=TEXTS[0]).status_code == 202
        refused = upload(served, ann, b=TEXTS[1])
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "quota_exceeded")
        assert told in refused.json()["error"]["message"]
        assert upload(served, bob, b=TEXTS[1]).status_code == 202
        assert upload(served, ann, a="Short.").status_code == 202, "less in its place"
        assert [each["id"] for each in served.http(ann).get("/v1/documents").json()["data"]] == ["a"]


def test_a_flood_of_texts_in_requests_evicts_the_tenants_own_and_nobody_elses(tmp_path: Path) -> None:
    with tenants(tmp_path, 1 << 30) as (sizing, *_):
        most = 3 * max(size_of(sizing, text) for text in TEXTS)
    with tenants(tmp_path / "new", most) as (served, ann, bob, _):
        upload(served, ann, a=TEXTS[0], b=TEXTS[1])
        ready(served, ann, "a", "b")
        before = {row.key for row in served.engine.store.ls(namespace("ann"))}
        for n in range(24):
            assert sources(ask(served, bob, {"text": f"{TEXTS[n % 8]} {n}"})) == ["compiled"]
        assert before <= {row.key for row in served.engine.store.ls(namespace("ann"))}
        for tier in (served.engine.store.memory, served.engine.store.disk):
            assert tier is not None
            assert 0 < tier.sizes()[namespace("bob")] <= most
        assert sources(ask(served, ann, "a", "b")) == ["memory", "memory"]
        assert all(not stats.failures for stats in served.engine.store.stats().values())


def test_quotas_follow_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    held, key, _ = KeyFile().added("ann")
    held.added("bob")[0].granting("bob", 7).write(path)
    shares = Shares(Keyring(path), 100)
    assert shares() == Quotas({namespace("ann"): 100, namespace("bob"): 7})
    assert shares() is shares()
    KeyFile.read(path).without(key.id).added("cid")[0].granting("bob", None).write(path)
    assert shares() == Quotas({namespace("bob"): 100, namespace("cid"): 100})
    assert [shares.of(name) for name in ("ann", "bob", "cid", None)] == [0, 100, 100, 0]


def test_quotas_that_no_tier_has_are_told_before_anything_is_served(tmp_path: Path) -> None:
    KeyFile().added("ann")[0].added("bob")[0].write(tmp_path / "keys")
    shares = Shares(Keyring(tmp_path / "keys"), 10 << 20)
    assert shares.check(memory=20 << 20, disk=20 << 20) == ""
    assert "in proportion" in shares.check(memory=19 << 20, disk=20 << 20)
    with pytest.raises(InputError, match="2 tenants may keep 20 MiB together, and the disk tier has 19 MiB"):
        shares.check(memory=1 << 20, disk=19 << 20)


Call = Callable[[Served, str, str], Any]


@pytest.mark.parametrize(
    "call",
    [
        lambda served, key, id: served.http(key).get(f"/v1/documents/{id}"),
        lambda served, key, id: served.http(key).delete(f"/v1/documents/{id}"),
        lambda served, key, id: served.http(key).get("/v1/documents", params={"after": id}),
        lambda served, key, id: served.http(key).post("/v1/chat/completions", json=named(id)),
        lambda served, key, id: served.http(key).post("/v1/chat/completions", json=named(id, wait=False)),
        lambda served, key, id: served.http(key).post("/tokenize", json={"messages": named(id)["messages"]}),
    ],
)
def test_another_tenants_id_is_answered_as_one_that_nobody_has(tmp_path: Path, call: Call) -> None:
    """Ready, failed and compiling ones alike: status, headers and body are the same but for the id itself."""
    with tenants(tmp_path) as (served, ann, bob, _):
        upload(served, ann, **{"one-there": TEXTS[0], "one-long": "word " * 3000})
        ready(served, ann, "one-there")
        until(lambda: served.http(ann).get("/v1/documents/one-long").json()["state"] == "failed")
        told = []
        for id in ("one-there", "one-long", "one-none"):
            found = call(served, bob, id)
            headers = {n: v for n, v in found.headers.items() if n not in ("x-request-id", "date", "content-length")}
            told.append((found.status_code, headers, found.text.replace(id, "ID")))
        assert told[0] == told[1] == told[2]
        assert served.http(ann).get("/v1/documents/one-there").json()["state"] == "ready"


def named(id: str, **kvquilt: Any) -> dict[str, Any]:
    content = [{"type": "document", "id": id}, {"type": "text", "text": "When?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "kvquilt": kvquilt}
