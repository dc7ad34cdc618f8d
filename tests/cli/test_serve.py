"""`kvquilt serve` as a process of its own, and `kvquilt keys`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from kvquilt.cli.demo import demo_documents
from kvquilt.cli.serve import _upload_demo
from kvquilt.errors import InputError
from tests.server.running import serving


def test_keys_are_made_named_and_revoked(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = run("keys", "add", "--file", file, "ann", "--json").json
    plain = run("keys", "add", "--file", file, "bob")
    assert plain.out.strip().startswith("kvq-")
    assert made["key"] not in file.read_text()
    assert plain.out.strip() not in run("keys", "list", "--file", file).out
    assert [each["tenant"] for each in run("keys", "list", "--file", file, "--json").json] == ["ann", "bob"]
    assert run("keys", "revoke", "--file", file, made["id"]).code == 0
    assert [each["tenant"] for each in run("keys", "list", "--file", file, "--json").json] == ["bob"]
    assert run("keys", "revoke", "--file", file, made["id"]).code == 2
    assert run("keys", "list", "--file", tmp_path / "none").code == 2
    assert run("keys", "add", "--file", file, " ").code == 2


def test_roles_and_quotas_of_keys(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    assert run("keys", "add", "--file", file, "ann").code == 0
    assert run("keys", "add", "--file", file, "--public", "--json").json["role"] == "publisher"
    assert run("keys", "add", "--file", file, "--operator").code == 0
    for wrong in ([], ["ann", "--public"], ["--public", "--operator"], ["*"]):
        assert run("keys", "add", "--file", file, *wrong).code == 2
    assert run("keys", "quota", "--file", file, "ann", "--mib", "64").code == 0
    assert run("keys", "quota", "--file", file, "--public", "--mib", "8").code == 0
    assert run("keys", "quota", "--file", file, "bob", "--mib", "8").code == 2
    told = {each["tenant"]: each["quota_bytes"] for each in run("keys", "list", "--file", file, "--json").json}
    assert told == {"ann": 64 << 20, "*": 8 << 20, "": None}
    assert "64 MiB" in run("keys", "list", "--file", file).out
    assert run("keys", "quota", "--file", file, "ann").code == 0
    assert run("keys", "list", "--file", file, "--json").json[0]["quota_bytes"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--host", "0.0.0.0"), "--api-keys"),
        (("--host", "::"), "--api-keys"),
        (("--host", "example.invalid"), "--api-keys"),
        (("--api-keys", "nowhere.json"), "no such file"),
        (("--demo", "--api-keys", "nowhere.json"), "goes without --api-keys"),
        (("--tenant-quota-mib", "5"), "goes with --api-keys"),
        (("--method", "nonsense"), "nonsense"),
        (("--method", "kv-packet"), "--writer PATH"),
    ],
)
def test_what_cannot_be_served_is_told_before_a_model_is_loaded(run: Any, arguments: Any, told: str) -> None:
    outcome = run("serve", "no-such-model", *arguments)
    assert outcome.code == 2
    assert told in outcome.err


def test_quotas_that_cannot_be_kept_are_told_before_a_model_is_loaded(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    for name in ("ann", "bob"):
        run("keys", "add", "--file", file, name)
    outcome = run("serve", "no-such-model", "--api-keys", file, "--tenant-quota-mib", 1 << 30)
    assert (outcome.code, "2 tenants may keep" in outcome.err) == (2, True)
    run("keys", "quota", "--file", file, "ann", "--mib", "5")
    outcome = run("serve", "no-such-model", "--api-keys", file)
    assert (outcome.code, "what the others may keep" in outcome.err) == (2, True)


def test_a_port_that_is_taken_is_told(run: Any) -> None:
    from kvquilt.server.running import listening

    taken = listening("127.0.0.1", 0)
    try:
        outcome = run("serve", "no-such-model", "--port", taken.getsockname()[1])
    finally:
        taken.close()
    assert (outcome.code, "port: another program listens there" in outcome.err) == (2, True)


def test_an_address_that_cannot_be_had_is_told() -> None:
    from kvquilt.server.running import listening

    with pytest.raises(InputError, match="cannot listen there") as caught:
        listening("192.0.2.1", 0)  # nobody's, by RFC 5737
    assert caught.value.field == "host"


def test_an_address_that_is_told_can_be_reached_though_nobody_accepts_yet() -> None:
    from kvquilt.server.running import listening

    with listening("127.0.0.1", 0) as made, socket.create_connection(made.getsockname(), timeout=10) as reached:
        assert reached.getpeername() == made.getsockname()


def test_the_demos_documents_replace_none_of_the_users() -> None:
    with serving() as served:
        served.http().post("/v1/documents", json={"id": "with", "text": "Mine."})
        _upload_demo(served.service)
        characters = {each["id"]: each["characters"] for each in served.http().get("/v1/documents").json()["data"]}
    assert characters == {each.id: len(each.text) for each in demo_documents()} | {"with": len("Mine.")}


def test_a_process_answers_logs_and_stops_when_told(model_folder: Path, tmp_path: Path) -> None:
    asked = ["serve", str(model_folder), "--port", "0", "--method", "none", "--threads", "1", "--demo"]
    command = [sys.executable, "-c", "from kvquilt.cli import main; main()", *asked]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stderr is not None
    try:
        at = re.search(r"http://[\d.:]+/v1", process.stderr.readline())
        assert at is not None
        with openai.OpenAI(base_url=at.group(), api_key="-", max_retries=0) as client:
            content: Any = [
                {"type": "document", "id": "secret-hours", "text": "The bakery opens at six."},
                {"type": "text", "text": "When?"},
            ]
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id, messages=[{"role": "user", "content": content}], max_tokens=3
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens
        held = httpx2.get(f"{at.group()}/documents").json()["data"]
        assert {each["id"] for each in held} == {each.id for each in demo_documents()}
        assert "<h1>kvquilt</h1>" in httpx2.get(at.group().removesuffix("v1")).text
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    lines = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    paths = [(line["path"], line["status"]) for line in lines if line["event"] == "request"]
    assert paths == [(f"/{path}", 200) for path in ("v1/models", "v1/chat/completions", "v1/documents", "")]
    assert "bakery" not in rest
