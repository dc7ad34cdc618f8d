"""`kvquilt writers rebind`: every kind goes over to another dtype of its own model, and nowhere else."""

from pathlib import Path

import pytest

from kvquilt.config import Settings
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.writers.artefact import read_manifest
from kvquilt.writers.block_tuned import BLOCK_TUNED, Tuning
from kvquilt.writers.rebinding import load_artefact
from tests.cli.conftest import Run
from tests.models import build
from tests.tokenizers import chatml_tokenizer
from tests.writers.trained import contents, random_parts, random_writers

KINDS = ("kv-packet", "sempic", "joint", "link-tokens", "encoder", BLOCK_TUNED)


@pytest.fixture
def loaded(model: Path) -> LanguageModel:
    """That of the settings, in float32."""
    return load_model(str(model), "float32", settings=Settings.resolve()[0])


def save(kind: str, loaded: LanguageModel, folder: Path) -> str:
    recipe = {"lr": 5e-4}
    if kind == BLOCK_TUNED:
        return Tuning.of(loaded.fingerprint, random_parts(loaded, 2, 0, 0), 4.0, loaded.name).save(folder, recipe)
    return random_writers(loaded)[kind].save(folder, recipe, {"kl": 0.5})


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_for_the_other_dtype_and_back_again_it_is_what_it_was(
    kind: str, run: Run, model: Path, loaded: LanguageModel, tmp_path: Path
) -> None:
    digest = save(kind, loaded, tmp_path / "w")
    before = contents(tmp_path / "w")
    there = run("writers", "rebind", tmp_path / "w", model, "--dtype", "bfloat16", "--out", tmp_path / "b", "--json")
    assert there.code == 0, there.err
    assert "nothing is measured of it in bfloat16" in there.err
    other = load_model(str(model), "bfloat16", settings=Settings.resolve()[0])
    made = load_artefact(tmp_path / "b")
    assert made.base == other.fingerprint
    about = read_manifest(tmp_path / "b")
    assert about["digest"] == there.json["digest"] != digest
    assert about["recipe"] == {"lr": 5e-4, "rebound_from": {"digest": digest, "dtype": "float32"}}
    assert about["metrics"] == {}, "what was measured in one dtype does not hold for the other"
    back = run("writers", "rebind", tmp_path / "b", "--dtype", "float32", "--out", tmp_path / "back")
    assert back.code == 0, back.err
    assert read_manifest(tmp_path / "back")["digest"] == digest
    assert contents(tmp_path / "w") == before


def test_the_copy_answers_in_its_dtype(run: Run, docs: Path, loaded: LanguageModel, tmp_path: Path) -> None:
    save("sempic", loaded, tmp_path / "w")
    run("writers", "rebind", tmp_path / "w", "--dtype", "bfloat16", "--out", tmp_path / "b")
    asked = ("ask", "--docs", docs, "What does it do?", "--method", "sempic", "--max-new-tokens", 2)
    answer = run(*asked, "--dtype", "bfloat16", "--writer", tmp_path / "b", "--json")
    assert answer.code == 0, answer.err
    refused = run(*asked, "--dtype", "bfloat16", "--writer", tmp_path / "w")
    assert (refused.code, "`kvquilt writers rebind`" in refused.err) == (3, True), "and says what to do"


def test_what_it_refuses(run: Run, model: Path, loaded: LanguageModel, tmp_path: Path) -> None:
    save("sempic", loaded, tmp_path / "w")
    build("llama", seed=9).save_pretrained(tmp_path / "other")
    chatml_tokenizer().save_pretrained(tmp_path / "other")
    out = ("--out", tmp_path / "b")
    other = run("writers", "rebind", tmp_path / "w", tmp_path / "other", "--dtype", "bfloat16", *out)
    assert (other.code, "what differs: weights" in other.err) == (3, True), other.err
    same = run("writers", "rebind", tmp_path / "w", "--dtype", "float32", *out)
    assert (same.code, "another than the writer's own" in same.err) == (2, True), same.err
    nothing = run("writers", "rebind", tmp_path / "nowhere", "--dtype", "bfloat16", *out)
    assert (nothing.code, "nowhere" in nothing.err) == (2, True), nothing.err
    assert not (tmp_path / "b").exists()
    onto = run("writers", "rebind", tmp_path / "w", "--dtype", "bfloat16", "--out", tmp_path / "w")
    assert (onto.code, "holds a writer already" in onto.err) == (2, True), onto.err
