"""`kvquilt train` on a tiny random model: from a folder of documents to a writer, stopped and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from kvquilt.training import sitting
from kvquilt.writers.artefact import load_writer, read_manifest
from tests.cli.conftest import Run

pytestmark = pytest.mark.usefixtures("model")
FAST = ("--new-tokens", 4, "--passage-tokens", 64, "--documents", 2, "--questions", 2, "--validation-sets", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "texts"
    made.mkdir()
    for name in ("with", "while", "assert"):
        (made / f"{name}.txt").write_text(topics[name].strip()[:160], encoding="utf-8")
    return made


def train(run: Run, data: object, out: Path, *more: object):
    return run("train", "--writer", "sempic", "--data", data, "--out", out, *FAST, *more)


def test_a_folder_of_documents_becomes_a_writer(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "writer"
    done = train(run, folder, out, "--rank", 2, "--steps", 2, "--validate-every", 1, "--json")
    assert done.code == 0, done.err
    assert done.json["steps"] == 2
    assert done.json["before"]["none"] == done.json["before"]["validation"]
    assert done.json["best"] <= done.json["before"]["none"]
    assert "step 2 of 2" in done.err
    assert load_writer(out).digest
    manifest = read_manifest(out)
    assert manifest["recipe"]["shape"]["rank"] == 2
    assert manifest["metrics"]["kl"] == done.json["best"]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    again = train(run, folder, out, "--rank", 2, "--steps", 2, "--validate-every", 1, "--json")
    assert again.json["best"] == done.json["best"]


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "writer"
    real, calls = sitting.Sitting.step, []

    def step(self):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(sitting.Sitting, "step", step)
        stopped = train(run, folder, out, "--steps", 2, "--validate-every", 1)
    assert stopped.code == 130
    assert "stopped after step 1" in stopped.err
    assert "same command goes on" in stopped.err
    assert load_writer(out).kind == "sempic"
    done = train(run, folder, out, "--steps", 2, "--validate-every", 1)
    assert done.code == 0, done.err
    assert [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert "--writer" in done.out


def test_a_part_begins_with_an_artefact_and_stays_frozen(run: Run, folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(run, folder, first, "--rank", 2, "--steps", 1, "--held-out", 0).code == 0
    done = run("train", "--writer", "joint", "--data", folder, "--out", second, *FAST, "--steps", 1, "--held-out", 0,
               "--from", first, "--freeze", "adapter", "--header", 1, "--trailer", 0)  # fmt: skip
    assert done.code == 0, done.err
    before, after = load_writer(first).named(), load_writer(second).named()
    assert {n: t.tolist() for n, t in after.items() if "lora" in n} == {n: t.tolist() for n, t in before.items()}
    assert len(after["header"]) == 1
    refused = run("train", "--writer", "sempic", "--data", folder, "--out", tmp_path / "third", *FAST, "--from", first,
                  "--rank", 4)  # fmt: skip
    assert refused.code == 2
    assert "rank" in refused.err


def test_without_matplotlib_the_writer_is_there_and_the_message_clear(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    out = tmp_path / "writer"
    done = train(run, folder, out, "--steps", 1, "--held-out", 0)
    assert done.code == 0, done.err
    assert "pip install 'kvquilt[plot]'" in done.err
    assert load_writer(out).kind == "sempic"


def test_published_is_the_papers_recipe(run: Run, folder: Path, tmp_path: Path) -> None:
    done = train(run, folder, tmp_path / "writer", "--published", "--steps", 1, "--held-out", 0, "--json")
    assert done.code == 0, done.err
    config = done.json["config"]
    assert (config["normalise"], config["batch"], config["epochs"], config["top"]) == ("sum", 16, 5, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--writer", "sempik"), "did you mean 'sempic'"),
        (("--data", "task:biografy"), "did you mean 'biography'"),
        (("--data", "task:hotpotqa"), "names its file"),
        (("--data", "nowhere"), "no such folder or file"),
        (("--documents", "two"), "whole numbers"),
        (("--documents", "0"), "documents"),
        (("--lr", "0"), "lr"),
        (("--freeze", "header"), "must be among what the writer has: adapter"),
        (("--freeze", "adapter"), "something must be left to train"),
        (("--rank", "0"), "shape"),
        (("--kl=0", "--dense=0"), "objective"),
        (("--temperature", "0"), "temperature"),
        (("--normalise", "mean"), "normalise"),
        (("--batch", "0"), "batch"),
        (("--held-out", "1"), "held_out"),
        (("--from", "nowhere"), "nowhere"),
        (("--documents", "9"), "passages"),
        (("--targets", "query"), "it has down_proj"),
    ],
)
def test_bad_input_is_one_line(run: Run, folder: Path, tmp_path: Path, options: tuple[str, str], said: str) -> None:
    defaults = {"--writer": "sempic", "--data": str(folder), "--out": str(tmp_path / "out")}
    given = [each for pair in {**defaults, options[0]: options[1]}.items() for each in pair]
    outcome = run("train", *given)
    assert outcome.code in (2, 3), outcome.exception
    assert said in outcome.err.splitlines()[-1]


def test_data_that_cannot_be_trained_on_is_refused_before_anything_is_computed(run: Run, tmp_path: Path) -> None:
    empty, one, long = tmp_path / "empty", tmp_path / "one", tmp_path / "long.jsonl"
    empty.mkdir()
    one.mkdir()
    (one / "a.txt").write_text("A single text.")
    long.write_text(json.dumps({"documents": ["word " * 2000], "question": "What?"}) + "\n")
    for data, said in ((empty, "no readable text"), (one, "at least two files"), (long, "context")):
        outcome = run("train", "--writer", "sempic", "--data", data, "--out", tmp_path / "o", "--held-out",
                      0 if data is long else 0.1)  # fmt: skip
        assert outcome.code == 2, outcome.err
        assert said in outcome.err


def test_a_writer_of_another_dtype_may_be_a_start_and_runs_share_a_teacher(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    kept, first, second = tmp_path / "teacher", tmp_path / "first", tmp_path / "second"
    options = ("--rank", 2, "--steps", 1, "--teacher", kept)
    assert train(run, folder, first, *options).code == 0
    asked = {path: path.read_bytes() for path in kept.iterdir()}
    assert asked
    assert train(run, folder, second, *options, "--lr", 1e-3).code == 0
    assert {path: path.read_bytes() for path in kept.iterdir()} == asked
    other = train(run, folder, tmp_path / "third", *options, "--from", first, "--dtype", "bfloat16")
    assert other.code == 0, other.err
    assert "a start, no more" in other.err


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("link-tokens", ("--links", 2)),
        ("encoder", ("--every", 2)),
        ("block-tuned", ("--rank", 2)),
        ("block-tuned", ("--rank", 0, "--full-share", 0.25)),
    ],
)
def test_every_kind_is_trained_and_used(
    run: Run, folder: Path, tmp_path: Path, kind: str, sizes: tuple[object, ...]
) -> None:
    out = tmp_path / "writer"
    done = run("train", "--writer", kind, "--data", folder, "--out", out, *FAST, "--steps", 1, "--held-out", 0, *sizes)
    assert done.code == 0, done.err
    method = "none" if kind == "block-tuned" else kind
    asked = ("ask", "--docs", folder, "What?", "--max-new-tokens", 2, "--json", "--method", method)
    if kind == "block-tuned":
        run(*asked)
    compiled = []
    for _ in range(2):
        answer = run(*asked, "--writer", out)
        assert answer.code == 0, answer.err
        assert answer.json["method"] == method
        compiled.append(answer.json["ledger"]["forward_tokens"]["compile"])
    assert compiled[0] > 0, "nothing that the plain model compiled is taken for a tuned reader's"
    assert compiled[1] == 0


def test_a_size_that_a_kind_has_not_is_an_error(run: Run, folder: Path, tmp_path: Path) -> None:
    encoder = ("train", "--writer", "encoder", "--data", folder, "--out", tmp_path / "w", *FAST)
    wrong = run(*encoder, "--rank", 2)
    assert wrong.code == 2
    assert "rank: encoder has none of that; it has every" in wrong.err
    behind = run(*encoder, "--every", 2, "--shared-prefix")
    assert "shared_prefix: an encoder encodes every document alone" in behind.err
    assert "asked nothing" not in behind.err, "refused before the model asks"
    two = ("--writer", tmp_path / "a", "--writer", tmp_path / "b")
    for name in ("a", "b"):
        assert run("train", "--writer", "block-tuned", "--data", folder, "--out", tmp_path / name, *FAST, "--steps", 1,
                   "--held-out", 0, "--rank", 1).code == 0  # fmt: skip
    refused = run("ask", "--docs", folder, *two, "What?")
    assert refused.code == 2
    assert "one tuned reader at most" in refused.err


def test_what_evaluates_is_not_trained_on(run: Run, tmp_path: Path) -> None:
    def line(name: str) -> dict[str, object]:
        texts = [f"The {thing} of {name} stands in {name}town." for thing in ("tower", "bridge")]
        return {"documents": texts, "question": f"Where is the tower of {name}?", "answers": [f"{name}town"]}

    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "test", "other")}
    for file, names in zip(files.values(), (("Ada", "Bea", "Cid"), ("Dan", "Bea"), ("Eve", "Fay")), strict=True):
        file.write_text("".join(json.dumps(line(name)) + "\n" for name in names), encoding="utf-8")
    few = ("--steps", 1, "--held-out", 0)
    assert train(run, files["train"], tmp_path / "a", *few, "--apart-from", f"jsonl:{files['other']}").code == 0
    refused = train(run, files["train"], tmp_path / "b", *few, "--apart-from", f"jsonl:{files['test']}")
    assert refused.code == 2
    assert "data: must be apart, but share documents" in refused.err
    assert not (tmp_path / "b" / "writer.json").exists()
