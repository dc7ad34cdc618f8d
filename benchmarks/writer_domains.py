"""Does a writer that was trained on one kind of documents serve another? Three writers, three domains, nine trainings.

Every writer is trained on every domain, from as many sets and by the same recipe, and each of the nine is measured on
held-out items of all three, through the engine: KL per answer token to full prefill along its own answer, and corpus
micro-F1 of the greedy answer. Biography and HotpotQA have gold answers; help topics have none, there F1 is that of the
answer against full prefill's own (`micro_f1_to_full`). Training and evaluation share no document.

The model is SmolLM2-135M-Instruct because it is cheap. It answers badly, so F1 says little; the table is about KL to
the model's own full prefill. Sets and items are as few as an hour of one core allows: per set about 2.5 s for the
teacher, once for three writers, and 2.7 s for a step; per item and cell about 1.5 s, most of it decoding.

A run that was stopped continues: trainings from their folders, and one JSON line is kept per measured cell.

    python benchmarks/writer_domains.py --model DIR --train-hotpotqa FILE --hotpotqa FILE --folder DIR --json OUT.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from domains import DOCUMENTS, Domain, biography, help_topics, hotpotqa

from kvquilt.bench import environment
from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.metrics import Counts, bag_counts, micro_f1_bag
from kvquilt.fidelity import Spoken, compare, truth
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.placement import place_runs
from kvquilt.repair.presets import find_method
from kvquilt.store import Store
from kvquilt.template import PromptTemplate
from kvquilt.training.config import TrainConfig, own
from kvquilt.training.progress import Progress
from kvquilt.training.trainer import Trainer
from kvquilt.writers.artefact import load_writer

_WRITERS = ("kv-packet", "sempic", "joint")
_PREFIXED = "none behind the shared prefix"  # what the engine does by default; writers are trained to stand alone
_NEW = 24
Cell = tuple[str, str, str]  # method, domain it was trained on or "", domain it is measured on


def recipe(kind: str, seed: int) -> TrainConfig:
    return replace(own(kind), lr=1e-3, lr_soft=5e-3, new_tokens=_NEW, validate_every=0, seed=seed)


@dataclass(eq=False)
class Bench:
    """The cells of the table. `mark` is what all lines of a folder have in common."""

    model: LanguageModel
    folder: Path
    mark: dict[str, Any]
    domains: dict[str, Domain]
    lines: dict[Cell, dict[str, Any]] = field(default_factory=dict)
    truths: dict[str, list[Spoken]] = field(default_factory=dict)

    @property
    def cells(self) -> list[Cell]:
        made = [(method, "", on) for method in ("full", "none", _PREFIXED) for on in self.domains]
        return made + [(kind, at, on) for at in self.domains for kind in _WRITERS for on in self.domains]

    def resume(self) -> None:
        """Take what an earlier run measured on at least as many items."""
        path = self.folder / "lines.jsonl"
        for written in path.read_text().splitlines() if path.exists() else ():
            line = json.loads(written)
            if line["mark"] != self.mark:
                raise InputError("folder", f"holds a run of {line['mark']}", self.mark)
            method, at, on = line["cell"]
            if len(line["samples"]) >= len(self.domains[on].items):
                self.lines[method, at, on] = line

    def run(self) -> None:
        waiting = [cell for cell in self.cells if cell not in self.lines]
        for n, cell in enumerate(waiting):
            left, trainings = len(waiting) - n, len({other[:2] for other in waiting[n:] if other[1]})
            print(f"{left} cells left, {trainings} trainings among them; now", *cell, flush=True)
            if cell[1]:
                self.train(*cell[:2])
            self.lines[cell] = line = self.measure(*cell)
            with (self.folder / "lines.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(self.row(cell), f"in {line['seconds']} s", flush=True)

    def train(self, kind: str, at: str) -> None:
        """To the end; where it ended before, that is found at once."""

        def report(made: Progress) -> None:
            if made.step % 8 == 0:
                what = f"step {made.step} of {made.steps}, loss {made.loss:.3f}, KL {made.kl:.3f}"
                print(f"{kind} on {at}: {what}, {made.remaining:.0f} s left", flush=True)

        domain = self.domains[at]
        template = PromptTemplate(self.model.tokenizer, domain.system)
        config, folder = recipe(kind, self.mark["seed"]), self.folder / f"{kind}-{at}"
        Trainer(self.model, template, config, domain.train, [], folder, self.folder / "teacher").train(report)

    def measure(self, method: str, at: str, on: str) -> dict[str, Any]:
        """The cell's line: per item, KL and agreement by answer token, and counts of words."""
        domain, began, samples = self.domains[on], time.perf_counter(), []
        name = "none" if method == _PREFIXED else method
        store = Store.open(None, 4 << 30)
        with Engine(self.model, store, system=domain.system, shared_prefix=method == _PREFIXED) as engine:
            if at:
                writer = load_writer(self.folder / f"{method}-{at}", self.model)
                engine.reader = replace(engine.reader, trained={method: writer})
            for n, item in enumerate(domain.items):
                true = self.true(engine, on, n)
                if method == "full":
                    samples.append({"tokens": len(true.ids), **self.score(true, true, domain, n)})
                    continue
                engine.compile(item.documents, gate=False, method=name)
                placement = place_runs(engine.prompt(item.questions[0], item.documents).runs(self.model.tokenizer))
                close = compare(engine, placement, find_method(name), None, true, own=_NEW)
                kl, agree = [round(float(v), 6) for v in close.kl], [int(v) for v in close.agree]
                samples.append({"kl": kl, "top1": agree, **self.score(close.spoken, true, domain, n)})
        seconds = round(time.perf_counter() - began, 1)
        return {"cell": [method, at, on], "mark": self.mark, "seconds": seconds, "samples": samples}

    def true(self, engine: Engine, on: str, n: int) -> Spoken:
        """Full prefill's answer to a domain's item, asked for once."""
        said = self.truths.setdefault(on, [])
        for item in self.domains[on].items[len(said) : n + 1]:
            placement = place_runs(engine.prompt(item.questions[0], item.documents).runs(self.model.tokenizer))
            said.append(truth(engine, placement, None, _NEW))
        return said[n]

    def score(self, spoken: Spoken, true: Spoken, domain: Domain, n: int) -> dict[str, Any]:
        text, reference = (
            self.model.tokenizer.decode([i for i in s.ids if i not in self.model.stop_ids], skip_special_tokens=True)
            for s in (spoken, true)
        )
        counts = bag_counts(text, domain.answers[n] if domain.answers else [reference], domain.form)
        return {"text": text, "counts": [counts.tp, counts.fp, counts.fn]}

    def samples(self, cell: Cell) -> list[dict[str, Any]]:
        return list(self.lines[cell]["samples"][: len(self.domains[cell[2]].items)])

    def row(self, cell: Cell) -> dict[str, Any]:
        samples, gold = self.samples(cell), bool(self.domains[cell[2]].answers)
        f1 = round(micro_f1_bag(Counts(*each["counts"]) for each in samples), 4)
        scored = {"micro_f1" if gold else "micro_f1_to_full": f1}
        if cell[0] == "full":
            tokens = round(statistics.mean(each["tokens"] for each in samples), 1)
            return {**(scored if gold else {}), "answer_tokens": tokens}
        means = torch.tensor([statistics.mean(each["kl"]) for each in samples])
        return {
            **scored,
            "mean_kl": round(statistics.mean(v for each in samples for v in each["kl"]), 4),
            "kl_standard_error": round(float(means.std() / len(means) ** 0.5), 4) if len(means) > 1 else None,
            "top1": round(statistics.mean(v for each in samples for v in each["top1"]), 4),
        }

    def result(self) -> dict[str, Any]:
        """`table` by method, domain of training where there is one, and domain of evaluation."""
        table: dict[str, Any] = {}
        for cell in self.cells:
            method, at, on = cell
            rows = table.setdefault(method, {})
            (rows.setdefault(at, {}) if at else rows)[on] = self.row(cell)
        means = {
            cell: [statistics.mean(s["kl"]) for s in self.samples(cell)] for cell in self.cells if cell[0] != "full"
        }
        return {
            "documents": DOCUMENTS,
            "questions": {d.name: sum(len(each.questions) for each in d.train) for d in self.domains.values()},
            "n": {d.name: len(d.items) for d in self.domains.values()},
            "recipe": {k: v for k, v in recipe("sempic", 0).as_dict().items() if k not in ("kind", "shape", "seed")},
            "table": table,
            "samples": {" | ".join(filter(None, c)): [round(v, 4) for v in kl] for c, kl in means.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", help="how the model is called in the result")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--train-hotpotqa", type=Path, required=True)
    parser.add_argument("--hotpotqa", type=Path, required=True, help="to measure on; never trained on")
    parser.add_argument("--folder", type=Path, required=True, help="what a stopped run goes on from")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sets", type=int, default=64)
    parser.add_argument("--items", type=int, default=40, help="per domain; may be fewer when a run goes on")
    parser.add_argument("--among", type=int, default=32, help="people, and passages of help, that items are about")
    parser.add_argument("--passages", type=int, default=64, help="of help to train on; asking about one costs a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = load_model(options.model, options.dtype, "cpu", options.threads, Settings.resolve()[0])
    options.folder.mkdir(parents=True, exist_ok=True)
    size = (options.sets, options.items, options.seed)
    domains = [
        biography(*size, options.among),
        hotpotqa(model, options.train_hotpotqa, options.hotpotqa, *size),
        help_topics(model, options.folder / "questions.jsonl", *size, options.among, options.passages),
    ]
    mark: dict[str, Any] = {name: getattr(options, name) for name in ("seed", "sets", "among", "passages")}
    mark["model"] = model.fingerprint.digest
    bench = Bench(model, options.folder, mark, {domain.name: domain for domain in domains})
    bench.resume()
    bench.run()
    mark["model"] = options.model_name or Path(options.model).name
    result = {**environment(), **mark, "dtype": options.dtype, **bench.result()}
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
