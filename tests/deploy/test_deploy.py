"""The files for deployment name what exists: flags, settings, extras, metrics. Images are not built here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command
from valkey import Valkey

from kvquilt.cli.app import app
from kvquilt.config import Settings
from kvquilt.remote import Remote
from kvquilt.server.traces import PATIENCE, PLACES
from tests.engines import documents
from tests.models import tiny
from tests.server.running import MODEL, serving
from tests.store import valkey_server

ROOT = Path(__file__).parents[2]
DOCKERFILE, UNIT = ROOT / "docker" / "Dockerfile", ROOT / "deploy" / "kvquilt.service"
COMPOSE = [ROOT / "docker" / f"{name}.yaml" for name in ("compose", "compose.cuda")]
PAGE = ROOT / "docs" / "deployment.md"
FILES = [DOCKERFILE, *COMPOSE, UNIT, PAGE]
NEITHER = {"--build", "--build-arg", "--constraint", "--file", "--rm", "--user"}  # of other programs, on the page alone
FLUSH = 10  # seconds, of a remote tier


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def flags(*verb: str) -> set[str]:
    command: Any = get_command(app)
    for name in verb:
        command = command.commands[name]
    return {flag for each in command.params for flag in each.opts}


def compose(path: Path) -> Any:
    return yaml.safe_load(text(path))


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text(UNIT).splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            found.setdefault(name, []).append(value)
    return found


def served_with() -> Iterator[tuple[str, list[str]]]:
    """Every command line that these files start the server with."""
    yield "unit", shlex.split(unit()["ExecStart"][0])[1:]
    yield "compose", compose(COMPOSE[0])["services"]["kvquilt"]["command"]
    yield "image", json.loads(re.findall(r"^CMD (\[.*\])$", text(DOCKERFILE), re.M)[0])


@pytest.mark.parametrize(("name", "words"), list(served_with()))
def test_the_server_is_started_with_flags_that_it_has(name: str, words: list[str]) -> None:
    verb, *rest = words
    assert verb == "serve"
    assert {each for each in rest if each.startswith("-")} <= flags("serve")
    context = get_command(app).commands["serve"].make_context("serve", list(rest))  # type: ignore[attr-defined]
    assert context.params["api_keys"].name == "keys.json"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_settings_that_are_named_exist(path: Path) -> None:
    named = set(re.findall(r"\bKVQUILT_[A-Z_]+\b", text(path)))
    assert named - {f"KVQUILT_{name.upper()}" for name in (*Settings.model_fields, "config")} == set()


def test_the_pages_commands_have_the_flags_that_it_names() -> None:
    lines = " ".join(re.findall(r"```sh\n(.*?)```", text(PAGE), re.S))
    commands = re.findall(r"kvquilt (serve|keys add|keys quota|store stats|doctor)\b([^\n#`]*)", lines)
    assert {verb for verb, _ in commands} == {"keys add", "keys quota"}
    for verb, rest in commands:
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= flags(*verb.split()), verb
    prose = set(re.findall(r"`(--[a-z-]+)", text(PAGE)))
    assert prose - NEITHER <= flags("serve") | flags("keys", "add") | flags("keys", "quota")


def test_compose_has_values_that_settings_take(monkeypatch: pytest.MonkeyPatch) -> None:
    server, valkey = (compose(COMPOSE[0])["services"][name] for name in ("kvquilt", "valkey"))
    for name, value in (server["environment"] | compose(COMPOSE[1])["services"]["kvquilt"]["environment"]).items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+(?::-(.*?))?(?::\?.*?)?\}", lambda found: found[1] or "given", value))
    settings, _ = Settings.resolve()
    assert isinstance(settings.remote, Remote)
    assert settings.remote_password is not None
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    assert "ports" not in valkey
    for each in (server, valkey):
        assert (each["read_only"], each["cap_drop"]) == (True, ["ALL"])


def test_no_command_line_has_a_secret() -> None:
    services = [each for path in COMPOSE for each in compose(path)["services"].values()]
    words = [word for each in services for name in ("command", "entrypoint") for word in each.get(name, [])]
    # $$NAME is read by a shell inside, from its environment; $NAME compose or systemd puts into the command line
    lines = [*unit()["ExecStart"], *(word.replace("$$", "") for word in words)]
    assert len(lines) > 3
    assert [line for line in lines if re.search(r"\$\{?\w*(PASSWORD|SECRET|TOKEN|KEY)", line)] == []


@pytest.mark.parametrize("password", ["0f" * 24, 'with space # " \\ $HOME `id` and more'])
def test_valkey_is_told_its_password_by_stdin_and_asks_for_it(password: str, tmp_path: Path) -> None:
    if valkey_server.FOUND is None:
        pytest.skip(valkey_server.WHY_NOT)
    command = [word.replace("$$", "$") for word in compose(COMPOSE[0])["services"]["valkey"]["command"]]
    place, found = tmp_path / "valkey-server", shlex.quote(valkey_server.FOUND)
    place.write_text(f'#!/bin/sh\nexec {found} "$@" --bind 127.0.0.1 --port $PORT\n')
    place.chmod(0o700)

    class Server(valkey_server.Server):
        def command(self) -> list[str]:
            given = f"PATH={tmp_path}:{os.environ['PATH']}", f"PORT={self.port}", f"VALKEY_PASSWORD={password}"
            return ["env", *given, *command]

    server = Server()
    try:
        assert server._process is not None
        ps = ["ps", "-ww", "-o", "args=", "-p", str(server._process.pid)]
        line = subprocess.run(ps, capture_output=True, text=True, check=True).stdout
        assert "valkey-server" in line, "the process that is started gets the signals"
        assert password not in line
        assert server.say("PING").startswith(b"-NOAUTH")
        with Valkey("127.0.0.1", server.port, password=password) as client:
            told = client.config_get("maxmemory*", "save", "appendonly")
        assert (told["maxmemory"], told["maxmemory-policy"]) == (str(8 << 30), "allkeys-lfu")
        assert (told["save"], told["appendonly"]) == ("", "no")
    finally:
        server.kill()


@pytest.mark.parametrize(("name", "words"), [each for each in served_with() if each[0] != "image"])
def test_whoever_stops_the_server_waits_for_its_answers_and_its_segments(name: str, words: list[str]) -> None:
    grace = float(words[words.index("--grace") + 1])
    waits = {
        "unit": unit()["TimeoutStopSec"][0],
        "compose": compose(COMPOSE[0])["services"]["kvquilt"]["stop_grace_period"].removesuffix("s"),
    }
    assert float(waits[name]) > 2 * grace + FLUSH + PATIENCE


def test_the_image_is_small_in_rights_and_pinned() -> None:
    stages = re.split(r"^FROM ", text(DOCKERFILE), flags=re.M)[1:]
    last = stages[-1]
    users = re.findall(r"^USER (.+)$", last, re.M)
    assert users == ["10001:10001"]
    assert last.index("USER ") < last.index("ENTRYPOINT")
    assert all(":latest" not in each.splitlines()[0] and ":" in each.splitlines()[0] for each in stages)
    assert not re.search(r"^(ADD|MAINTAINER)\b|\bsudo\b|curl .*\|", text(DOCKERFILE), re.M)
    assert "STOPSIGNAL SIGTERM" in last
    copied = [word for words in re.findall(r"^COPY (?!--from)(.+)$", text(DOCKERFILE), re.M) for word in words.split()]
    allowed = set(re.findall(r"^!(.+)$", text(DOCKERFILE.with_name("Dockerfile.dockerignore")), re.M))
    for each in {word.removeprefix("./") for word in copied if not word.startswith("./")}:
        assert (ROOT / each).exists(), each
        assert each in allowed
    wanted = re.search(r"'\.\[(.+?)\]'", text(DOCKERFILE))
    assert wanted is not None
    extras = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    assert set(wanted[1].split(",")) <= set(extras)


def test_the_variants_of_the_image_are_those_that_compose_asks_for() -> None:
    variants = set(re.findall(r"^ {8}(\w+)\) (?:pip install|test -n)", text(DOCKERFILE), re.M))
    assert {compose(path)["services"]["kvquilt"]["build"]["args"]["VARIANT"] for path in COMPOSE} == variants


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    assert (unit()["User"], unit()["KillSignal"]) == (["kvquilt"], ["SIGTERM"])
    assert "NoNewPrivileges" in unit()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    copy = tmp_path / UNIT.name
    copy.write_text(text(UNIT).replace("/opt/kvquilt/bin/kvquilt", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Names of series that a server with some traffic has, and of those that a remote tier adds."""
    from kvquilt.server.gauges import counted
    from kvquilt.store import TierStats

    with serving() as served:
        parts = [{"type": "document", "id": each.id, "text": each.text} for each in documents(2)]
        content: Any = [*parts, {"type": "text", "text": "What is it?"}]
        for method in ("none", "epic:1000000", "auto"):
            asked = {"extra_body": {"kvquilt": {"method": method}}, "max_tokens": 6}
            message = {"role": "user", "content": content}
            served.client().chat.completions.create(model=MODEL, messages=[message], **asked)  # type: ignore[call-overload]
        served.rests()
        found = text_string_to_metric_families(served.http().get("/metrics").text)
        names = {sample.name for family in found for sample in family.samples}
    remote = TierStats(None, None, None, failures={"timeout": 1}, waiting=1, breaker="open")
    return names | {sample.name for family in counted(MODEL, {"remote": remote}) for sample in family.samples}


def named_in(expression: str) -> set[str]:
    return set(re.findall(r"kvquilt:\w+", expression))


def test_every_metric_of_the_dashboard_is_there(exposed: set[str]) -> None:
    board = json.loads(text(ROOT / "deploy" / "grafana.json"))
    panels = [each for each in board["panels"] if each["type"] != "row"]
    wanted = {name for each in panels for target in each["targets"] for name in named_in(target["expr"])}
    assert len(wanted) > 25
    assert wanted - exposed == set()


def test_the_dashboard_can_be_imported_anywhere() -> None:
    board = json.loads(text(ROOT / "deploy" / "grafana.json"))
    assert [each["name"] for each in board["templating"]["list"]] == ["datasource", "job"]
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"])
    placed = set()
    for each in board["panels"]:
        where = each["gridPos"]
        cells = {
            (x, y)
            for x in range(where["x"], where["x"] + where["w"])
            for y in range(where["y"], where["y"] + where["h"])
        }
        assert not placed & cells
        assert where["x"] + where["w"] <= 24
        placed |= cells
        for target in each.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("(") == target["expr"].count(")")


def test_alerts_are_rules_over_metrics_that_are_there(exposed: set[str]) -> None:
    (group,) = yaml.safe_load(text(ROOT / "deploy" / "alerts.yaml"))["groups"]
    for rule in group["rules"]:
        assert named_in(rule["expr"]) <= exposed, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["description"].endswith(".")
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])


def test_bytes_of_a_token_are_what_the_page_says() -> None:
    assert "2 x layers x key-value heads x head size x bytes of a number" in text(PAGE)
    model = tiny("llama")
    config = model.hf.config
    said = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert model.bytes_per_token == said


def test_traces_are_asked_for_as_the_page_says() -> None:
    assert PLACES[0] in text(PAGE)
