"""Every writer and every setting on a small reader: what is learnt, from how much, and what repair adds.

Each configuration is trained from the same exercises and measured on the same held-out ones: micro-F1 of the answer
(one token in this task, so the most likely first token is the answer), KL per answer token to full prefill along its
own answer, recovery = (F1 - none) / (full - none). One JSON line per configuration and seed; a run that was stopped
continues where it stopped.

    python benchmarks/writer_study.py --reader DIR --lines LINES.jsonl --json OUT.json [--only main objective ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from small_task import SYSTEM, exercises, items

from kvquilt.bench import environment
from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.evaluation.tasks.metrics import Counts, f1_recovery
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.model.parts import PLAIN
from kvquilt.store import Store
from kvquilt.template import PromptTemplate
from kvquilt.training.config import KINDS, TrainConfig
from kvquilt.training.exercise import Exercise
from kvquilt.training.lesson import Lesson, lesson
from kvquilt.training.objective import Objective, divergence
from kvquilt.training.student import Student
from kvquilt.training.targets import Targets
from kvquilt.training.teacher import Branches, Target, Teacher
from kvquilt.training.trainable import Pupil
from kvquilt.training.trainer import Trainer
from kvquilt.writers.artefact import load_writer
from kvquilt.writers.loaded import Usable
from kvquilt.writers.trained import TRAINED

_DOCUMENTS, _QUESTIONS, _NEW = 5, 4, 4


@dataclass(frozen=True)
class Setting:
    """One row of a table; `samples` are questions, `questions` of them about one set of documents."""

    study: str
    name: str
    config: TrainConfig
    samples: int = 2048
    questions: int = 4
    seeds: tuple[int, ...] = (0,)
    repairs: tuple[str, ...] = ()  # methods that the trained writer is served by, through the engine


def config(kind: str, **changes: Any) -> TrainConfig:
    shape = type(KINDS[kind])(**(asdict(KINDS[kind]) | changes.pop("shape", {})))
    base = TrainConfig(kind=kind, shape=shape, batch=4, micro_batch=4, lr=2e-3, lr_soft=2e-2, new_tokens=_NEW)
    return replace(base, objective=Objective(dense=10.0), validate_every=0, keep_targets=True, **changes)


def settings() -> list[Setting]:
    three = (0, 1, 2)
    made = [Setting("main", kind, config(kind), seeds=three) for kind in TRAINED]
    made += [
        Setting("other writers", "link-tokens", config("link-tokens"), seeds=three),
        Setting("other writers", "encoder", config("encoder", shape={"every": 1}, lr=1e-3)),
        Setting("other writers", "block-tuned, rank 8", config("block-tuned")),
        Setting("other writers", "block-tuned, whole", config("block-tuned", shape={"rank": 0}, lr=2e-4)),
    ]
    for samples in (128, 512):
        arms = ("sempic", "retrieved-document:5%", "retrieved-document:5%,writer=sempic", "none")
        made.append(Setting("repair", f"sempic {samples}", config("sempic"), samples, repairs=arms))
    for samples in (128, 256, 512, 2048):
        made += [Setting("samples", f"{k} {samples}", config(k), samples) for k in ("kv-packet", "sempic")]
    for rank in (2, 4, 8, 16, 32):
        made.append(Setting("rank", f"rank {rank}", config("sempic", shape={"rank": rank, "alpha": 2.0 * rank}), 256))
    for name in (
        "q_proj k_proj",
        "k_proj v_proj",
        "v_proj o_proj",
        "q_proj k_proj v_proj o_proj",
        "gate_proj up_proj down_proj",
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    ):
        made.append(Setting("targets", name, config("sempic", shape={"targets": tuple(name.split())}), 256))
    for count in (2, 4, 8, 16):
        made.append(
            Setting(
                "soft tokens", f"{count} + {count}", config("kv-packet", shape={"header": count, "trailer": count}), 256
            )
        )
    for header, trailer in ((8, 0), (0, 8)):
        made.append(
            Setting(
                "soft tokens",
                f"{header} + {trailer}",
                config("kv-packet", shape={"header": header, "trailer": trailer}),
                256,
            )
        )
    goals = {
        "kl": Objective(),
        "ce": Objective(kl=0.0, ce=1.0),
        "kl + dense": Objective(dense=10.0),
        "dense": Objective(kl=0.0, dense=10.0),
        "kl, temperature 2": Objective(temperature=2.0),
    }
    for kind in ("kv-packet", "sempic"):
        for name, goal in goals.items():
            made.append(Setting("objective", f"{kind} {name}", replace(config(kind), objective=goal), 512, seeds=three))
    for questions in (1, 2, 4, 8):
        made.append(
            Setting(
                "questions per set",
                f"sempic {questions}",
                config("sempic", batch=8 // questions or 1, micro_batch=8 // questions or 1),
                512,
                questions,
                three,
            )
        )
    for kind in TRAINED:
        made.append(Setting("shared prefix", kind, config(kind, shared_prefix=True), 256, seeds=three))
        made.append(Setting("alone, as many samples", kind, config(kind), 256, seeds=three))
    made.append(Setting("shuffle", "sempic", config("sempic", shuffle=True), 512, seeds=three))
    made.append(
        Setting(
            "published recipe",
            "sempic",
            replace(config("sempic", normalise="sum", batch=16, micro_batch=4), objective=Objective(), lr=5e-4),
            2048,
            1,
        )
    )
    made.append(
        Setting(
            "published recipe",
            "kv-packet",
            replace(config("kv-packet", normalise="sum", batch=16, micro_batch=4), objective=Objective(), lr_soft=5e-4),
            2048,
            1,
        )
    )
    return made


@dataclass(eq=False)
class Bench:
    """The reader, and what everything is measured on."""

    model: LanguageModel
    template: PromptTemplate
    folder: Path
    count: int
    held: list[tuple[Lesson, list[Target], tuple[str, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        targets = Targets(self.model, Teacher(_NEW, 0), None)
        made = exercises("test", self.count // _QUESTIONS, _DOCUMENTS, _QUESTIONS, 1)
        self.held = []
        for n, each in enumerate(made):
            tokens = lesson(
                f"test {n}", Exercise(each.documents, each.questions), self.template, self.model.capability, _NEW
            )
            self.held.append((tokens, targets.of(tokens), each.answers))

    def full(self) -> dict[str, float]:
        said = [
            (self._word(t.answer[0]), gold)
            for _, known, golds in self.held
            for t, gold in zip(known, golds, strict=True)
        ]
        return {"f1": _f1(said)}

    @torch.no_grad()
    def measure(self, student: Pupil, parts: Any) -> dict[str, float]:
        said, kl, hit = [], [], []
        for first in range(0, len(self.held), 8):
            part = self.held[first : first + 8]
            branches = [Branches.of(each.questions, [t.answer for t in known]) for each, known, _ in part]
            reads = student.read(parts, [each for each, _, _ in part], branches)
            for read, mine, (_, known, golds) in zip(reads, branches, part, strict=True):
                for n, (target, gold) in enumerate(zip(known, golds, strict=True)):
                    logits = mine.answer_rows(read.logits, n)
                    kl += divergence(target, logits).tolist()
                    hit += [int(i) == j for i, j in zip(logits.argmax(-1), target.answer, strict=True)]
                    said.append((self._word(int(logits[0].argmax())), gold))
        return {"f1": _f1(said), "kl": statistics.mean(kl), "top1": statistics.mean(hit)}

    def _word(self, token: int) -> str:
        return self.model.tokenizer.decode([token], skip_special_tokens=True).strip()

    def run(self, setting: Setting, seed: int) -> dict[str, Any]:
        made = exercises("train", setting.samples // setting.questions, _DOCUMENTS, setting.questions, 100 + seed)
        train = [Exercise(each.documents, each.questions) for each in made]
        chosen = replace(setting.config, seed=seed)
        with tempfile.TemporaryDirectory() as out:
            trainer = Trainer(
                self.model, self.template, chosen, train, [], Path(out), self.folder / "targets", save_every=10**9
            )
            began = time.perf_counter()
            components = trainer.train()
            seconds = time.perf_counter() - began
            served = self.served(load_writer(Path(out), self.model), setting.repairs) if setting.repairs else {}
        prefix = self.template.opening if chosen.shared_prefix else ()
        student = chosen.shape.pupil(self.model, prefix, True)
        return {
            "study": setting.study,
            "name": setting.name,
            "seed": seed,
            "samples": setting.samples,
            "questions": setting.questions,
            "seconds": round(seconds, 1),
            **self.measure(student, components.parts()),
            **({"served_f1": served} if served else {}),
        }

    def served(self, writer: Usable, methods: Sequence[str]) -> dict[str, float]:
        """F1 of the engine's own answers, one question per set."""
        found: dict[str, list[tuple[str, str]]] = {method: [] for method in ("full", *methods)}
        settings = Settings.resolve()[0]
        with Engine(self.model, Store.open(None, 1 << 30), settings, system=SYSTEM, writers={writer.kind: writer}) as e:
            for item in items("test", self.count, _DOCUMENTS, 2):
                for method, said in found.items():
                    answer = e.ask(item.question, item.documents, method=method, max_new_tokens=1)
                    said.append((answer.text.strip(), item.answers[0]))
        return {method: round(_f1(said), 4) for method, said in found.items()}


def _f1(said: list[tuple[str, str]]) -> float:
    counts = Counts(0, 0, 0)
    for word, gold in said:
        right = int(word == gold)
        counts += Counts(right, int(bool(word)) - right, 1 - right)
    return counts.f1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    model = load_model(options.reader, "float32", "cpu", options.threads, Settings.resolve()[0])
    template = PromptTemplate(model.tokenizer, SYSTEM)
    known = [json.loads(line) for line in options.lines.read_text().splitlines()] if options.lines.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, template, Path(folder), options.count)
        base: dict[str, Any] = {"full": bench.full()}
        base["none"] = bench.measure(Student(model), PLAIN)
        base["none behind the shared prefix"] = bench.measure(Student(model, prefix=template.opening), PLAIN)
        print({name: {k: round(v, 3) for k, v in row.items()} for name, row in base.items()}, flush=True)
        for setting in settings():
            if options.only and setting.study not in options.only:
                continue
            for seed in setting.seeds:
                if any((r["study"], r["name"], r["seed"]) == (setting.study, setting.name, seed) for r in known):
                    continue
                row = bench.run(setting, seed)
                row["recovery"] = f1_recovery(row["f1"], base["none"]["f1"], base["full"]["f1"])
                known.append(row)
                with options.lines.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    result = {
        **environment(),
        "reader": Path(model.name).name,
        "threads": options.threads,
        "n": options.count,
        **base,
        "rows": known,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
