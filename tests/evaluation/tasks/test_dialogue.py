"""Reading LoCoMo's form: dialogues of our own, and the public file where EVALUATION_DATA names its folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvquilt.document import Document
from kvquilt.errors import InputError, LeakageError
from kvquilt.evaluation.tasks.dialogue import DialogueTask
from kvquilt.evaluation.tasks.leakage import check_apart

SHA256 = "8f941d1c22ab3dee4cb72521fbccc82d24c30208590a15b0b4005a2f927ff769"


def dialogue(name: str, sittings: int = 4) -> dict[str, Any]:
    """Two people who tell each other what they bought."""
    conversation: dict[str, Any] = {"speaker_a": "Ada", "speaker_b": "Bo", "session_99_date_time": "never"}
    for k in range(sittings, 0, -1):
        conversation[f"session_{k}_date_time"] = f"{k} May 2023"
        conversation[f"session_{k}"] = [
            {"speaker": "Ada", "dia_id": f"D{k}:1", "text": f"I bought\n a kite{k} for {name}."},
            {"speaker": "Bo", "dia_id": f"D{k}:2", "text": "Look!", "blip_caption": f"{name}, boat{k}"},
        ]

    def asked(k: int, *evidence: str, answer: object = None, category: int = 4) -> dict[str, Any]:
        row = {"question": f" What about kite{k} for {name}? ", "evidence": list(evidence), "category": category}
        return row if category == 5 else row | {"answer": answer or f"kite{k}"}

    questions = [
        asked(1, "D1:1"),
        asked(2, "D2:1 D:3:2", "D4:02", category=1),
        asked(3, "D3:1", category=5),
        asked(3, "D", "D3:1", answer=2022),
        asked(4),
        asked(4, "D4:1", "D4:3"),
        asked(4, "D"),
    ]
    return {"sample_id": name, "conversation": conversation, "qa": questions}


def write(folder: Path, rows: object) -> Path:
    path = folder / "dialogues.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, [dialogue(f"talk{n}") for n in range(5)])


def test_dialogues_are_split_and_take_turns(path: Path) -> None:
    task = DialogueTask(path)
    assert [item.id for item in task.items("tuning")] == [f"talk{n}-{q}" for q in (0, 1, 3) for n in (0, 1)]
    evaluation = task.items("evaluation")
    assert {item.group for item in evaluation} == {"talk2", "talk3", "talk4"}
    assert [item.kind for item in evaluation if item.group == "talk2"] == ["category 4", "category 1", "category 4"]
    assert task.items("evaluation", 4) == evaluation[:4]
    check_apart(task.items("tuning"), evaluation)


def test_another_file_tunes_if_it_shares_no_sitting(path: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    task = DialogueTask(path, write(other, [dialogue("another")]))
    assert [len(task.items(split)) for split in task.splits] == [3, 15]
    same = dialogue("talk3") | {"sample_id": "renamed"}
    with pytest.raises(LeakageError, match="tuning: must be apart, but share documents renamed-1, renamed-2"):
        DialogueTask(path, write(other, [same]))


def test_questions_that_cannot_be_graded_are_counted(path: Path) -> None:
    assert DialogueTask(path).skipped == {
        "unanswerable": 5,
        "no evidence": 10,
        "evidence that names no turn": 10,
        "evidence that is not in the dialogue": 5,
    }


def test_sittings_and_turns_as_documents(path: Path) -> None:
    sittings = DialogueTask(path, documents=9).items("tuning", 1)[0]
    assert [d.id for d in sittings.documents] == ["talk0-1", "talk0-2", "talk0-3", "talk0-4"]
    first = "1 May 2023\nAda: I bought a kite1 for talk0.\nBo: Look! [talk0, boat1]"
    assert sittings.documents[0].text == first
    assert (sittings.question, sittings.answers) == ("What about kite1 for talk0?", ("kite1",))
    turns = DialogueTask(path, documents=9, unit="turn").items("tuning", 1)[0]
    assert [d.id for d in turns.documents] == [f"talk0-{k}:{n}" for k in range(1, 5) for n in (1, 2)]
    assert turns.documents[1].text == "1 May 2023\nBo: Look! [talk0, boat1]"


def test_evidence_is_found_in_every_spelling(path: Path) -> None:
    task = DialogueTask(path, documents=9)
    gold = {item.id: item.gold for item in task.items("tuning")}
    assert [gold[f"talk0-{n}"] for n in (0, 1, 3)] == [(0,), (1, 2, 3), (2,)]
    by_turn = {item.id: item for item in DialogueTask(path, documents=9, unit="turn").items("tuning")}["talk0-1"]
    assert [by_turn.documents[n].id for n in by_turn.gold] == ["talk0-2:1", "talk0-3:2", "talk0-4:2"]
    assert {item.id: item.answers for item in task.items("tuning")}["talk1-3"] == ("2022",)


def test_the_callers_retriever_chooses_and_its_scores_stay(path: Path) -> None:
    made = []

    class Last:
        """Finds what was said last."""

        def __init__(self, documents: Sequence[Document]) -> None:
            self.documents = [Document(d.text, id=d.id, score=float(n)) for n, d in enumerate(documents)]
            made.append(self)

        def top_k(self, question: str, k: int) -> list[Document]:
            assert question.startswith("What about kite")
            return self.documents[: -k - 1 : -1]

    items = DialogueTask(path, documents=2, retriever=Last).items("tuning")
    assert [len(each.documents) for each in made] == [4, 4], "once for every dialogue"
    assert [(d.id, d.score) for d in items[0].documents] == [("talk0-3", 2.0), ("talk0-4", 3.0)]
    gold = {item.id: item.gold for item in items}
    assert [gold[f"talk0-{n}"] for n in (0, 1, 3)] == [(), (0, 1), (0,)], "evidence that was not found is not there"


def test_bm25_finds_the_words_of_the_question(path: Path) -> None:
    items = DialogueTask(path, documents=1).items("evaluation")
    assert [item.documents[0].id for item in items[:3]] == [f"talk{n}-1" for n in (2, 3, 4)]
    assert items[0].documents[0].score is not None


def test_evidence_among_others_that_are_drawn(tmp_path: Path) -> None:
    task = DialogueTask(write(tmp_path, [dialogue("talk", 7)]), share=0.0, form="evidence", documents=2)
    items = [task.items("evaluation", seed=seed) for seed in range(120)]
    for one, several, other in items:
        assert [len(one.gold), len(several.gold), len(other.gold)] == [1, 3, 1]
        assert [len(item.documents) for item in (one, several, other)] == [2, 3, 2]
        assert [d.id for d in one.documents] == sorted(d.id for d in one.documents)
    drawn = Counter(d.id for one, *_ in items for n, d in enumerate(one.documents) if n not in one.gold)
    assert len(drawn) == 6
    assert sum((n - 20) ** 2 / 20 for n in drawn.values()) < 20.5  # 0.999 of 5 degrees of freedom


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda row: row.pop("sample_id"), "must be a list of LoCoMo's dialogues"),
        (lambda row: row["qa"][0].pop("answer"), "must be a list of LoCoMo's dialogues"),
        (lambda row: row["conversation"].pop("session_2_date_time"), "must be a list of LoCoMo's dialogues"),
        (lambda row: row["conversation"]["session_2"][0].update(dia_id="2"), "must be a list of LoCoMo's dialogues"),
        (lambda row: row["qa"].clear(), "must ask something"),
    ],
)
def test_a_dialogue_of_another_form_is_named_by_its_index(tmp_path: Path, change: Any, rule: str) -> None:
    rows = [dialogue("one"), dialogue("two")]
    change(rows[1])
    with pytest.raises(InputError, match=rule) as refused:
        DialogueTask(write(tmp_path, rows))
    assert refused.value.field == "path[1]"


def test_other_files_and_settings_are_refused(path: Path, tmp_path: Path) -> None:
    for wrong in ({"form": "found"}, {"unit": "word"}, {"documents": 0}, {"share": 2.0}):
        with pytest.raises(InputError) as refused:
            DialogueTask(path, **wrong)  # type: ignore[arg-type]
        assert refused.value.field in wrong
    with pytest.raises(InputError, match="a sample_id comes up twice"):
        DialogueTask(write(tmp_path, [dialogue("one"), dialogue("one")]))
    with pytest.raises(InputError, match="must be a list of LoCoMo's dialogues"):
        DialogueTask(write(tmp_path, {}))


def test_the_public_file() -> None:
    folder = os.environ.get("EVALUATION_DATA")
    if folder is None:
        pytest.skip("EVALUATION_DATA does not name a folder with LoCoMo's file")
    task = DialogueTask(Path(folder) / "locomo10.json", form="evidence", sha256=SHA256)
    tuning, evaluation = (task.items(split) for split in task.splits)
    assert task.skipped == {
        "unanswerable": 446,
        "no evidence": 4,
        "evidence that names no turn": 1,
        "evidence that is not in the dialogue": 2,
    }
    assert len(tuning) + len(evaluation) == 1985 - 446 - 4 - 2
    assert [len({item.group for item in items}) for items in (tuning, evaluation)] == [4, 6]
    assert all(item.gold for item in tuning + evaluation)
    assert sum(len(d.sittings) for split in task.splits for d in task.dialogues.split(split)) == 272
    check_apart(tuning, evaluation)
