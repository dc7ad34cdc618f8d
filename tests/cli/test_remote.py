"""A remote tier on the command line: two machines that share a server, and a server that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.store import valkey_server
from tests.store.valkey_server import Server

needs_server = pytest.mark.skipif(valkey_server.FOUND is None, reason=valkey_server.WHY_NOT)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with valkey_server.running("--requirepass", "geheim") as server:
        monkeypatch.setenv("KVQUILT_REMOTE", f"{server.url}?deadline=20&write_deadline=20&flush=20")
        monkeypatch.setenv("KVQUILT_REMOTE_PASSWORD", "geheim")
        yield server


@needs_server
def test_what_one_machine_compiled_another_reads(
    run: Run, docs: Path, model: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("compile", docs, "--no-gate").code == 0
    assert run("store", "verify", "--json").json["checked"] == 2 * len(run("store", "ls", "--json").json)
    monkeypatch.setenv("KVQUILT_STORE_DIR", str(tmp_path / "another"))
    answer = run("ask", "--docs", docs, "with", "--method", "none", "--json", "--max-new-tokens", "2")
    assert answer.code == 0, answer.err
    assert answer.json["ledger"]["bytes_read"]["valkey"] > 0
    assert run("store", "rm", "--all").code == 0
    assert run("store", "verify", "--json").json == {"checked": 0, "damaged": [], "removed": 0, "unread": []}


@needs_server
def test_what_is_shown_has_no_secret(run: Run, server: Server) -> None:
    shown = [run("config", "show"), run("config", "show", "--json"), run("store", "stats"), run("store", "verify")]
    assert [each.code for each in shown] == [0] * 4
    assert "geheim" not in "".join(each.out + each.err for each in shown)
    assert f"127.0.0.1:{server.port}/0" in shown[0].out
    assert shown[2].out.splitlines()[-1].endswith("/0?deadline=20.0&write_deadline=20.0&flush=20.0 answers")
    told = run("store", "stats", "--json").json["valkey"]
    assert (told["segments"], told["breaker"], told["answers"]) == (None, "closed", True)


def test_a_server_that_is_not_there_is_said_and_stops_nothing(
    run: Run, docs: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("valkey")
    monkeypatch.setenv("KVQUILT_REMOTE", "valkey://:geheim@127.0.0.1:1?flush=1")
    answer = run("ask", "--docs", docs, "with", "--method", "none", "--json", "--max-new-tokens", "2")
    assert answer.code == 0, answer.err
    told = run("store", "stats", "--json").json["valkey"]
    assert told["answers"] is False
    assert run("store", "stats").out.splitlines()[-1].endswith("does not answer")
    verified = run("store", "verify")
    assert verified.code == 4
    assert "the valkey tier does not answer and was not read" in verified.err
    removed = run("store", "rm", "--all")
    assert removed.code == 4
    assert "remote tier valkey://:***@127.0.0.1:1" in removed.err
    assert run("store", "ls", "--json").json == [], "what could be removed is"
    for each in (answer, verified, removed):
        assert "geheim" not in each.out + each.err
