"""Bad input: a typed error that names field, input and rule, and nothing lost."""

from __future__ import annotations

import bisect
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvquilt import Document, Engine, Prompt
from kvquilt.config import Settings
from kvquilt.errors import (
    ContextLengthError,
    InputError,
    KvquiltError,
    ModelNotFoundError,
    StoreUnavailableError,
    UnsupportedModelError,
)
from kvquilt.model.load import load_model
from kvquilt.prompt import segment_ids
from tests.engines import QUESTION, at_rest, documents, make_engine, stored_bytes
from tests.models import build
from tests.tokenizers import chatml_tokenizer

SECRET = "xylophone"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Holds four compiled documents, which must be the same afterwards."""
    with make_engine(directory=tmp_path / "store") as made:
        made.compile(documents(), gate=False)
        before = stored_bytes(made)
        yield made
        assert stored_bytes(made) == before
        at_rest(made)


TWO_TEXTS = [Document("a", id="x"), Document("b", id="x")]
CASES: dict[str, tuple[Callable[[Engine], object], str]] = {
    "empty question": (lambda e: e.ask("", documents()), "question"),
    "blank question": (lambda e: e.ask(" \n", documents()), "question"),
    "no question": (lambda e: e.ask(None, documents()), "question"),  # type: ignore[arg-type]
    "documents missing": (lambda e: e.ask(QUESTION), "documents"),
    "no documents": (lambda e: e.ask(QUESTION, []), "documents"),
    "a text for documents": (lambda e: e.ask(QUESTION, "text"), "documents"),  # type: ignore[arg-type]
    "texts for documents": (lambda e: e.ask(QUESTION, ["text"]), "documents[0]"),  # type: ignore[list-item]
    "empty document": (lambda e: e.ask(QUESTION, [Document("", id="a")]), "documents[0].text"),
    "blank document": (lambda e: e.ask(QUESTION, [*documents(1), Document(" \n", id="a")]), "documents[1].text"),
    "binary document": (lambda e: e.ask(QUESTION, [Document("a\x00b")]), "Document.text"),
    "lone surrogate": (lambda e: e.ask(QUESTION, [Document("a\udc80b")]), "Document.text"),
    "bytes": (lambda e: e.ask(QUESTION, [Document(b"abc")]), "Document.text"),  # type: ignore[arg-type]
    "duplicate": (lambda e: e.ask(QUESTION, documents(1) * 2), "documents[1].id"),
    "same id, other text": (lambda e: e.ask(QUESTION, TWO_TEXTS), "documents[1].id"),
    "compile nothing": (lambda e: e.compile([]), "documents"),
    "compile an empty one": (lambda e: e.compile([Document("", id="a")]), "documents[0].text"),
    "compile a duplicate": (lambda e: e.compile(TWO_TEXTS), "documents[1].id"),
    "doctor nothing": (lambda e: e.doctor([]), "documents"),
    "prompt and documents": (lambda e: e.ask(Prompt(["Hi"]), documents()), "documents"),
    "prompt without tokens": (lambda e: e.ask(Prompt([""])), "question"),
    "unknown method": (lambda e: e.ask(QUESTION, documents(), method="retrieved-documents"), "method"),
    "a number for method": (lambda e: e.ask(QUESTION, documents(), method=3), "method"),  # type: ignore[arg-type]
    "a list for method": (lambda e: e.ask(QUESTION, documents(), method=["none"]), "method"),  # type: ignore[arg-type]
    "a number for policy": (lambda e: e.ask(QUESTION, documents(), policy=3), "policy"),  # type: ignore[arg-type]
    "a list for policy": (lambda e: e.ask(QUESTION, documents(), policy=["auto"]), "policy"),  # type: ignore[arg-type]
    "unknown policy": (lambda e: e.ask(QUESTION, documents(), policy="never"), "policy"),
    "bad temperature": (lambda e: e.ask(QUESTION, documents(), temperature=-1), "temperature"),
    "bad top_p": (lambda e: e.ask(QUESTION, documents(), top_p=0), "top_p"),
    "bad top_k": (lambda e: e.ask(QUESTION, documents(), top_k=-1), "top_k"),
    "bad length": (lambda e: e.ask(QUESTION, documents(), max_new_tokens=0), "max_new_tokens"),
    "bad stop": (lambda e: e.ask(QUESTION, documents(), stop="END"), "stop"),
    "lone surrogate in tenant": (lambda e: e.ask(QUESTION, documents(), tenant="a\udc80"), "tenant"),
    "compile for such a tenant": (lambda e: e.compile(documents(), tenant="a\udc80"), "tenant"),
    "a number for tenant": (lambda e: e.ask(QUESTION, documents(), tenant=5), "tenant"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_field_is_named_and_nothing_is_lost(engine: Engine, name: str) -> None:
    deed, field = CASES[name]
    with pytest.raises(InputError) as caught:
        deed(engine)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"method": "retreived-document"}, "did you mean 'retrieved-document'"),
        ({"method": "xylophone"}, r"valid: .*auto, .*full, .*none, .*retrieved-document"),
        ({"policy": "alway"}, "did you mean 'always'"),
    ],
)
def test_unknown_names_come_with_the_nearest(engine: Engine, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        engine.ask(QUESTION, documents(), **options)


def test_an_error_never_quotes_a_document(engine: Engine) -> None:
    bad: list[Callable[[], object]] = [
        lambda: Document(SECRET + "\x00"),
        lambda: engine.ask(QUESTION, [Document(SECRET, id="x"), Document(SECRET + "!", id="x")]),
        lambda: engine.ask(QUESTION, [Document(f"{SECRET} " * 3000, id="x")]),
        lambda: engine.compile([Document(f"{SECRET} " * 3000, id="x")]),
    ]
    for deed in bad:
        with pytest.raises(InputError) as caught:
            deed()
        error: BaseException | None = caught.value
        while error is not None:
            assert SECRET not in str(error)
            error = error.__cause__ or error.__context__


def test_a_prompt_too_long_says_by_how_much_and_what_to_drop(engine: Engine) -> None:
    docs = [*documents(2), Document("word " * 150, id="large"), Document("word " * 60, id="larger than most")]
    runs = engine.prompt(QUESTION, docs).runs(engine.model.tokenizer)
    total, size = sum(len(r.ids) for r in runs), len(segment_ids(docs[2], engine.model.tokenizer))
    over = total + 8 - 1024
    assert over > 0
    with pytest.raises(ContextLengthError) as caught:
        engine.ask(QUESTION, docs, method="none")
    message = str(caught.value)
    assert message.startswith("prompt: ")
    assert f"{total} prompt and 8 answer tokens" in message
    assert f"by {over}" in message
    assert f"drop 'large' ({size} tokens)" in message
    assert engine.ask(QUESTION, [docs[0], docs[1]], method="none").prompt_tokens < 1024
    engine._release(engine._live.popleft())
    for path in [row.key for row in engine.store.ls() if row.tokens == len(engine.reader.preamble)]:
        engine.store.rm(key=path)


def test_a_prompt_that_fits_to_the_token_is_answered() -> None:
    with make_engine() as engine:

        def size(characters: int) -> int:
            docs = [Document("8 " * characters, id="x")]
            return len(engine.prompt(QUESTION, docs).ids(engine.model.tokenizer))

        text = "8 " * (bisect.bisect_right(range(2000), 1024 - 3, lo=1, key=size) - 1)
        room = 1024 - size(len(text) // 2)
        assert room in (3, 4)
        for method in ("full", "none"):
            answer = engine.ask(QUESTION, [Document(text, id="x")], method=method, max_new_tokens=room)
            assert len(answer.token_ids) <= room
            with pytest.raises(ContextLengthError, match="by 1;"):
                engine.ask(QUESTION, [Document(text, id="x")], method=method, max_new_tokens=room + 1)
        assert engine.store.stats()["memory"].segments <= 2


def test_a_huge_document_is_refused_before_anything_is_compiled(engine: Engine) -> None:
    docs = [Document("a new one", id="new"), Document("word " * 5000, id="huge")]
    with pytest.raises(ContextLengthError, match=r"documents: 'huge' is \d+ tokens longer than the context"):
        engine.compile(docs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model folder."""
    path = tmp_path / "model"
    build("llama").save_pretrained(path)
    chatml_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store_dir=tmp_path / "store", cache_dir=tmp_path / "cache", models_dir=tmp_path)


def test_a_sound_folder_loads_by_path_and_by_name(folder: Path, settings: Settings) -> None:
    one = load_model(str(folder), settings=settings)
    two = load_model("model", settings=settings)
    assert one.fingerprint == two.fingerprint
    assert list((settings.cache_dir / "digests").iterdir())


def test_a_folder_without_tokenizer(folder: Path, settings: Settings) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelNotFoundError, match="tokenizer"):
        load_model(str(folder), settings=settings)


def test_a_folder_without_weights(folder: Path, settings: Settings) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="weights could not be loaded"):
        load_model(str(folder), settings=settings)


def test_a_folder_whose_weights_are_damaged(folder: Path, settings: Settings) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match="weights could not be loaded"):
        load_model(str(folder), settings=settings)


def test_a_folder_that_is_not_there(settings: Settings, tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(ModelNotFoundError, match="nowhere: not a model folder"):
            load_model(name, settings=settings)


def test_a_model_that_cannot_be_reused_is_refused_before_a_store_is_opened(folder: Path, settings: Settings) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="M-RoPE"):
        Engine.load(str(folder), settings=settings)
    assert not settings.store_dir.exists()


def test_bad_load_options(folder: Path, settings: Settings) -> None:
    with pytest.raises(InputError, match=r"dtype: must be one of .*; did you mean 'float16'"):
        load_model(str(folder), dtype="float61", settings=settings)
    with pytest.raises(InputError, match="threads: must be at least 1"):
        load_model(str(folder), threads=0, settings=settings)
    with pytest.raises(InputError, match="device"):
        load_model(str(folder), device="cqu", settings=settings)


def test_a_store_of_another_version(tmp_path: Path) -> None:
    with make_engine(directory=tmp_path) as engine:
        engine.compile(documents(1), gate=False)
    (tmp_path / "kvquilt-store.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StoreUnavailableError, match=r"format 99, this version of kvquilt reads"):
        make_engine(directory=tmp_path)
    assert list(tmp_path.rglob("*.safetensors")), "nothing is deleted"


def test_a_store_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a directory")
    with pytest.raises(StoreUnavailableError):
        make_engine(directory=tmp_path / "store")
    assert (tmp_path / "store").read_text() == "not a directory"


@pytest.mark.parametrize("failure", ["read-only", "full"])
def test_a_store_that_cannot_be_written_still_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    docs = documents()
    with make_engine(directory=tmp_path) as engine:
        engine.compile(docs[:2], gate=False)
        truth = engine.ask(QUESTION, docs[:2], method="none").token_ids
        kept = stored_bytes(engine)
    if failure == "full":

        def no_space(*args: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", no_space)
    else:  # permissions do not stop a superuser, so the store is told
        monkeypatch.setattr(os, "access", lambda path, mode, **rest: not mode & os.W_OK)
    with make_engine(directory=tmp_path) as engine:
        assert engine.ask(QUESTION, docs[:2], method="none").token_ids == truth
        answer = engine.ask(QUESTION, docs, method="none")
        assert [d.source == "compiled" for d in answer.ledger.documents] == [False, False, True, True]
        again = engine.ask(QUESTION, docs, method="none")
        assert again.token_ids == answer.token_ids
        assert again.ledger.forward_tokens["compile"] == 0, "memory still has them"
        failures = engine.store.stats()["disk"].failures
        assert sum(failures.values()) >= 2
        assert engine.compile(docs, gate=True).gate is not None, "a verdict that cannot be stored is still known"
        assert engine.verdict() is not None
        assert stored_bytes(engine) == kept
        at_rest(engine, conversations=1)


def test_every_error_is_of_the_one_tree() -> None:
    for kind in (InputError, ContextLengthError, ModelNotFoundError, StoreUnavailableError, UnsupportedModelError):
        assert issubclass(kind, KvquiltError)
