"""Vectors of texts: static ones from files of a package's form, those of an encoder, and what is nearest."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, LlamaConfig

from kvquilt.dense import PACKAGE, StaticEncoder, find_encoder, similarities
from kvquilt.errors import InputError
from kvquilt.model.text_encoder import TextEncoder
from tests.tokenizers import chatml_tokenizer


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Four words, each a direction of its own."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "tokenizers").mkdir()
    save_file({"embedding.weight": np.eye(4, dtype=np.float16)}, tmp_path / "weights" / "l2_supercat_256.safetensors")
    tokenizer = Tokenizer(WordLevel({"red": 0, "green": 1, "blue": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_padding(length=8)  # must not count
    tokenizer.save(str(tmp_path / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    return tmp_path


def test_static_vectors_are_means_of_length_one(package: Path) -> None:
    encoder = StaticEncoder.load(package)
    found = encoder.vectors(["red", "red red green green", "blue", ""])
    np.testing.assert_allclose(found[:3], [[1, 0, 0, 0], [0.5**0.5, 0.5**0.5, 0, 0], [0, 0, 1, 0]], atol=1e-6)
    assert not found[3].any()
    np.testing.assert_allclose(similarities(encoder, "red", ["green", "red blue"]), [0, 0.5**0.5], atol=1e-6)


def test_a_package_of_another_form_is_told(package: Path) -> None:
    (package / "weights" / "l2_supercat_256.safetensors").unlink()
    with pytest.raises(InputError, match="has no file weights/"):
        StaticEncoder.load(package)


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")
def test_the_package_itself() -> None:
    near, far = similarities(
        find_encoder(PACKAGE), "Where was she born?", ["Her birthplace is Rome.", "Cats eat fish."]
    )
    assert near > far


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("encoders") / "tiny", chatml_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=64, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_padding_and_company_do_not_change_an_encoders_vectors(encoder_folder: Path) -> None:
    encoder = find_encoder(str(encoder_folder))
    assert isinstance(encoder, TextEncoder)
    assert encoder.name == "tiny"
    texts = ["short", "a text that is a good deal longer", "x" * 500]
    together = encoder.vectors(texts)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_allclose(encoder.vectors([text])[0], row, atol=1e-5)
    assert similarities(encoder, "short", texts)[0] == pytest.approx(1, abs=1e-5)


def test_the_mean_is_over_the_texts_own_tokens(encoder_folder: Path) -> None:
    encoder = TextEncoder.load(str(encoder_folder))
    ids = encoder.tokenizer(["some words"], return_tensors="pt")
    with torch.inference_mode():
        mean = encoder.hf(**{k: ids[k] for k in ("input_ids", "attention_mask")}).last_hidden_state[0].mean(0)
    expected = (mean / mean.norm()).numpy()
    np.testing.assert_allclose(encoder.vectors(["some words"])[0], expected, atol=1e-5)


def test_what_is_no_encoder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an encoder's folder or id"):
        find_encoder(str(tmp_path))
