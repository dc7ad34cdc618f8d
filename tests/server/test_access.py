"""Keys and tenants: who may ask, whose documents are whose, and what the key file gives away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from kvquilt.errors import InputError
from kvquilt.identity import PUBLIC, namespace
from kvquilt.server.keyring import Keyring
from kvquilt.server.keys import KeyFile, Role
from tests.server.running import MODEL, Served, serving
from tests.waiting import until


def key_file(path: Path, *tenants: str) -> list[str]:
    held, secrets = KeyFile(), []
    for tenant in tenants:
        held, _, secret = held.added(tenant)
        secrets.append(secret)
    held.write(path)
    return secrets


def ask(served: Served, key: str, name: str) -> Any:
    content: Any = [{"type": "document", "id": name}, {"type": "text", "text": "When?"}]
    return served.client(key).chat.completions.create(
        model=MODEL, temperature=0, max_tokens=3, messages=[{"role": "user", "content": content}],
        extra_body={"kvquilt": {"method": "none"}},
    )  # fmt: skip


def test_tenants_see_neither_each_others_documents_nor_their_segments(tmp_path: Path) -> None:
    ann, bob = key_file(tmp_path / "keys", "ann", "bob")
    with serving(directory=tmp_path / "store", keyring=Keyring(tmp_path / "keys")) as served:
        text = "The bakery opens at six, but never on Mondays."
        served.http(ann).post("/v1/documents", json={"id": "hours", "text": text})
        assert ask(served, ann, "hours").kvquilt["documents"][0]["source"] == "memory"
        assert served.http(bob).get("/v1/documents").json()["data"] == []
        for call in (
            lambda: served.http(bob).get("/v1/documents/hours"),
            lambda: served.http(bob).delete("/v1/documents/hours"),
        ):
            assert call().status_code == 404
        with pytest.raises(openai.NotFoundError):
            ask(served, bob, "hours")
        served.http(bob).post("/v1/documents", json={"id": "hours", "text": text})
        until(lambda: served.http(bob).get("/v1/documents/hours").json()["state"] == "ready")
        spaces = {row.key.namespace for row in served.engine.store.ls()}
        assert {namespace("ann"), namespace("bob")} <= spaces
        served.http(bob).delete("/v1/documents/hours")
        assert ask(served, ann, "hours").kvquilt["documents"][0]["source"] in ("memory", "disk")
        served.rests()


def test_without_a_key_or_with_a_wrong_one_nothing_is_told(tmp_path: Path) -> None:
    (ann,) = key_file(tmp_path / "keys", "ann")
    with serving(keyring=Keyring(tmp_path / "keys")) as served:
        for wrong in ("-", "kvq-" + "A" * 43, ann[:-1], ann + "x", "ünïcode", "x" * 5000):
            headers = {"authorization": f"Bearer {wrong}".encode()}
            for path in ("/v1/models", "/v1/documents"):
                told = served.http().get(path, headers=headers)
                assert (told.status_code, told.json()["error"]["code"]) == (401, "invalid_api_key")
                assert told.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            served.client("wrong").models.list()
        assert served.http().get("/health").status_code == 200
        assert [model.id for model in served.client(ann).models.list()] == [MODEL]


def test_a_revoked_key_is_refused_at_once_and_a_new_one_taken(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    ann, bob = key_file(path, "ann", "bob")
    with serving(keyring=Keyring(path)) as served:
        assert served.http(ann).get("/v1/models").status_code == 200
        held = KeyFile.read(path)
        held, _, cid = held.without(held.keys[0].id).added("cid")
        held.write(path)
        assert [served.http(key).get("/v1/models").status_code for key in (ann, bob, cid)] == [401, 200, 200]
        path.write_text("{}")
        assert served.http(bob).get("/v1/models").status_code == 401
        held.write(path)
        assert served.http(bob).get("/v1/models").status_code == 200


def test_the_file_holds_no_key_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first, second = key_file(path, "ann", "ann")
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert first[4:] not in text
    assert second[4:] not in text
    held = KeyFile.read(path)
    found = [held.find(each) for each in (first, second, first[:-1], "")]
    assert [each and each.tenant for each in found] == ["ann", "ann", None, None]
    assert len({key.digest for key in held.keys}) == 2
    assert "digest" not in repr(held.keys[0])
    path.chmod(0o640)
    with pytest.raises(InputError, match="chmod 600"):
        KeyFile.read(path)


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvquilt.server import keys

    secrets = key_file(tmp_path / "keys", "a", "b", "c")
    seen, compare = [], keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda x, y: seen.append(y) or compare(x, y))
    held = KeyFile.read(tmp_path / "keys")
    for secret in (secrets[0], "wrong"):
        seen.clear()
        held.find(secret)
        assert len(seen) == 3


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 2, "salt": "", "keys": []}', '{"version": 1, "salt": "zz", "keys": []}',
                '{"version": 1, "salt": "00", "keys": [{"id": "a"}]}',
                '{"version": 1, "salt": "00", "keys": [{"id": "a", "tenant": "*", "created": 0, "digest": ""}]}',
                '{"version": 1, "salt": "00", "keys": [{"id": "a", "tenant": "b", "created": 0, "digest": "", '
                '"role": "operator"}]}',
                '{"version": 1, "salt": "00", "keys": [], "quotas": [1]}',
                '{"version": 1, "salt": "00", "keys": [{"id": "a", "tenant": "b", "created": 0, "digest": "00"}]}',
                '{"version": 1, "salt": "SALT", "keys": [{"id": "a", "tenant": "b", "created": 0, "digest": 5}]}'],
)  # fmt: skip
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(content.replace("SALT", "00" * 32))
    with pytest.raises(InputError, match="api-keys"):
        Keyring(path)


@pytest.mark.parametrize(
    "changed", [{"tenant": 5}, {"tenant": ["a"]}, {"tenant": "\ud800"}, {"id": 7}, {"created": "now"}, {"digest": None},
                {"digest": "\u00e9"}, {"role": []}, {"quotas": {"a": -1}}, {"quotas": {"a": 1e999}},
                {"quotas": {"a": "1"}}, {"salt": "00"}, "[" * 100_000],
    ids=lambda each: str(each)[:24].encode("ascii", "backslashreplace").decode(),
)  # fmt: skip
def test_a_file_that_is_damaged_under_a_server_opens_nothing_and_fails_nothing(tmp_path: Path, changed: Any) -> None:
    (secret,) = key_file(path := tmp_path / "keys", "a")
    held, whole = Keyring(path), path.read_text()
    data = json.loads(whole)
    if isinstance(changed, dict):
        (data if changed.keys() & data.keys() else data["keys"][0]).update(changed)
    path.write_text(json.dumps(data) if isinstance(changed, dict) else changed)
    assert (held.file.find(secret), held.file.tenants) == (None, ())
    path.write_text(whole)
    assert held.file.tenants == ("a",)


_ADDS = """
import sys
from kvquilt.cli import main
sys.stdin.readline()
file, count = sys.argv[1:]
for _ in range(int(count)):
    sys.argv[1:] = ["keys", "add", "--file", file, "tenant"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
"""


def test_processes_that_add_keys_at_the_same_moment_lose_none(tmp_path: Path) -> None:
    path, root = tmp_path / "new" / "keys", Path(__file__).parents[2]
    many = [
        subprocess.Popen(
            [sys.executable, "-c", _ADDS, str(path), "8"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, cwd=root,
        )
        for _ in range(4)
    ]  # fmt: skip
    secrets = [line for each in many for line in each.communicate("go\n", timeout=120)[0].split()]
    assert [each.returncode for each in many] == [0] * 4
    held = KeyFile.read(path)
    assert len(held.keys) == len(set(secrets)) == 32
    assert all(held.find(each) is not None for each in secrets)


def test_a_publishers_and_an_operators_key_belong_to_no_tenant() -> None:
    held, publisher, _ = KeyFile().added(role=Role.PUBLISHER)
    held, operator, _ = held.added(role=Role.OPERATOR)
    held, ann, _ = held.added("ann")
    assert [key.tenant for key in (publisher, operator, ann)] == [PUBLIC, "", "ann"]
    assert held.tenants == (PUBLIC, "ann")
    for name, role in ((PUBLIC, Role.TENANT), ("", Role.TENANT), ("x" * 129, Role.TENANT), ("ann", Role.OPERATOR)):
        with pytest.raises(InputError, match="tenant"):
            held.added(name, role)


def test_quotas_are_the_tenants_and_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key_file(path, "ann", "bob")
    KeyFile.read(path).granting("ann", 5 << 20).granting("bob", 1).granting("bob", None).write(path)
    assert KeyFile.read(path).quotas == {"ann": 5 << 20}
    with pytest.raises(InputError, match="has no key"):
        KeyFile.read(path).granting("cid", 1)
    with pytest.raises(InputError, match="quota"):
        KeyFile.read(path).granting("ann", -1)


def test_numbers_of_all_tenants_are_the_operators_alone(tmp_path: Path) -> None:
    held, _, ann = KeyFile().added("ann")
    held, _, operator = held.added(role=Role.OPERATOR)
    held.write(tmp_path / "keys")
    with serving(keyring=Keyring(tmp_path / "keys")) as served:
        told = [served.http(key).get("/metrics") for key in ("", "wrong", ann, operator)]
        assert [each.status_code for each in told] == [401, 401, 403, 200]
        assert all("kvquilt:" not in each.text for each in told[:3])
        for path in ("/v1/models", "/v1/documents", "/v1/kvquilt/state"):
            refused = served.http(operator).get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_key")
        assert [served.http().get(path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_without_keys_only_names_of_this_machine_are_answered() -> None:
    with serving() as served:
        http = served.http()
        for path in ("/v1/models", "/metrics"):
            for foreign in ("evil.example", "evil.example:80", "localhost.evil.example", "10.0.0.1", "[::2]:80", ""):
                assert http.get(path, headers={"host": foreign}).status_code == 403, foreign
            for own in ("localhost:80", "LOCALHOST", "127.0.0.1", "127.0.0.2:80", "[::1]:80", "[::1]"):
                assert http.get(path, headers={"host": own}).status_code == 200, own
        # a form of a foreign page reaches the server without being asked first, but only as another type
        sent = json.dumps({"text": "planted"})
        assert http.post("/v1/documents", content=sent, headers={"content-type": "text/plain"}).status_code == 415
