"""What an engine is made of: which of the folders that are given are writers, and which is the reader itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvquilt.config import Settings
from kvquilt.model.load import load_model
from kvquilt.opening import open_parts
from kvquilt.training.block_tuned import TunedShape
from kvquilt.writers.block_tuned import Tuning
from kvquilt.writers.folder import ADAPTER, CONFIG, MANIFEST
from tests.models import build
from tests.tokenizers import chatml_tokenizer


@pytest.mark.parametrize("ended", ["whole", "staged"])
def test_a_tuned_reader_is_known_wherever_saving_it_ended(ended: str, tmp_path: Path) -> None:
    base, folder = tmp_path / "model", tmp_path / "reader"
    build("llama").save_pretrained(base)
    chatml_tokenizer().save_pretrained(base)
    settings, shape = Settings(store_dir=tmp_path / "store", cache_dir=tmp_path / "cache"), TunedShape(2)
    model = load_model(str(base), "float32", settings=settings)
    Tuning.of(model.fingerprint, shape.drawn(model, 0), shape.alpha).save(folder)
    if ended == "staged":
        (folder / ".staged").mkdir()
        for name in (CONFIG, ADAPTER, MANIFEST):
            (folder / name).rename(folder / ".staged" / name)
    opened = open_parts(settings, str(base), writer=str(folder), dtype="float32")
    opened.store.close()
    assert not opened.writers
    assert opened.model.name.endswith("(block-tuned)")
