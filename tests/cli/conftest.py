import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from typer.testing import CliRunner

from kvquilt.cli.app import app
from tests.models import build
from tests.tokenizers import chatml_tokenizer


class Outcome:
    """What a run of the command line printed and ended with."""

    def __init__(self, result: Any) -> None:
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
        self.exception = result.exception

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store and a cache of this test alone, and no setting of the person who runs it."""
    for name in list(os.environ):
        if name.startswith("KVQUILT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVQUILT_STORE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("KVQUILT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def run() -> Run:
    runner = CliRunner()

    def invoke(*arguments: object) -> Outcome:
        return Outcome(runner.invoke(app, [str(each) for each in arguments], prog_name="kvquilt"))

    yield invoke
    log = logging.getLogger("kvquilt")
    log.handlers.clear()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a small tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build("llama").save_pretrained(folder)
    chatml_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model as the settings' model."""
    monkeypatch.setenv("KVQUILT_MODEL", str(model_folder))
    return model_folder


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Three small files of text and one that is not."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in ("with", "while", "assert"):
        (folder / f"{name}.txt").write_text(topics[name].strip()[:300], encoding="utf-8")
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x80 not text")
    return folder
