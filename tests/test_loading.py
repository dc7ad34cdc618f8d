"""Loading a model folder: faults are named truly and early, and an optional memo never stands in the way."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from kvquilt.config import Settings
from kvquilt.errors import InputError, ModelNotFoundError, UnsupportedModelError
from kvquilt.model import load
from kvquilt.model.load import load_model, weights_digest
from tests.models import build
from tests.tokenizers import chatml_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model folder."""
    path = tmp_path / "model"
    build("llama").save_pretrained(path)
    chatml_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store_dir=tmp_path / "store", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("device", ["cqu", "meta", "cuda:99", 5])
def test_a_device_that_is_not_there_is_an_input_error(folder: Path, settings: Settings, device: object) -> None:
    with pytest.raises(InputError) as caught:
        load_model(str(folder), device=device, settings=settings)  # type: ignore[arg-type]
    assert caught.value.field == "device"


def test_a_build_without_cuda_says_so_before_anything_is_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "zeros", refused)
    with pytest.raises(InputError, match=r"device: is not there.*cuda:0"):
        load_model("./nowhere", device="cuda:0", settings=settings)


def test_an_encoder_decoder_is_refused_with_the_true_reason(folder: Path, settings: Settings) -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match=r"model of type 't5' is an encoder-decoder$"):
        load_model(str(folder), settings=settings)


def test_an_architecture_that_is_no_language_model_is_refused(folder: Path, settings: Settings) -> None:
    for kind, reason in (("vit", "model of type 'vit' is none of transformers' causal"), ("starfish", "starfish")):
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            load_model(str(folder), settings=settings)
        assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_is_told_in_short(folder: Path, settings: Settings) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(str(folder), settings=settings)
    assert str(caught.value) == f"{folder}: has no tokenizer"


def test_an_unwritable_cache_costs_the_memo_and_not_the_model(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(store_dir=tmp_path / "store", cache_dir=tmp_path / "file")
    with caplog.at_level(logging.WARNING, "kvquilt"):
        model = load_model(str(folder), settings=settings)
    assert model.fingerprint.weights == weights_digest(model.hf)
    assert "memo could not be kept" in caplog.text


@pytest.mark.parametrize("damage", ["", "[]", "{}"])
def test_a_damaged_memo_is_computed_anew(folder: Path, tmp_path: Path, damage: str) -> None:
    hf = build("llama")
    digest = weights_digest(hf, folder, tmp_path)
    [memo] = (tmp_path / "digests").iterdir()
    memo.write_text(damage)
    assert weights_digest(hf, folder, tmp_path) == digest
    assert json.loads(memo.read_text()) == {"weights": digest}


def test_a_memo_belongs_to_one_folder_on_one_device(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = build("llama")
    mark = load._mark(hf, folder)
    (tmp_path / "link").symlink_to(folder)
    assert load._mark(hf, tmp_path / "link") == mark
    shutil.move(folder, tmp_path / "moved")  # keeps inodes, sizes and times
    assert load._mark(hf, tmp_path / "moved") != mark
    shutil.move(tmp_path / "moved", folder)
    assert load._mark(hf, folder) == mark
    stat = Path.stat

    def elsewhere(self: Path, **kwargs: bool) -> os.stat_result:
        found = stat(self, **kwargs)
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:]), {"st_mtime_ns": found.st_mtime_ns})

    monkeypatch.setattr(Path, "stat", elsewhere)
    assert load._mark(hf, folder) != mark


@pytest.mark.parametrize("name", ["smollm3x", "missing.gguf", "~/no/such/model"])
def test_a_mistyped_name_fails_at_once_and_asks_no_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: pytest.fail("the hub was asked"))
    with pytest.raises(ModelNotFoundError, match=re.escape(name)):
        load_model(name)
