"""Processor seconds of one training step by stage, and the operations that they are spent on.

One set of five biographies with 1, 4 and 8 questions: the writer's pass, the reader's, the loss, both backwards; then
the whole step again with KV gradient checkpointing. Beside them what the teacher takes to answer, which is kept and so
paid once per run, and the products' operations. Arms take turns; medians are reported. The student's answers are drawn.

Stages are in processor seconds, summed over threads, which other processes change little. The wall's seconds are given
for the whole step: on a busy machine they say nothing.

    python benchmarks/training_speed.py --model PATH --json OUT.json [--questions 1 4 8] [--rounds 2] [--no-teacher]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from training_set import drawn_targets, lessons_of, loss_of, warm

from kvquilt.bench import environment, portable
from kvquilt.config import Settings
from kvquilt.model.graph import Read, frozen
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.training.components import Components
from kvquilt.training.lesson import Lesson
from kvquilt.training.shape import Shape
from kvquilt.training.student import Student
from kvquilt.training.teacher import Branches, Target, Teacher

_TOP = 8
_STAGES = ("writer", "reader", "loss", "backward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", help="how the model is called in the result")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-teacher", action="store_true", help="leave out how long the teacher takes")
    options = parser.parse_args()
    model = load_model(options.model, "float32", "cpu", options.threads, Settings.resolve()[0])
    components, student, least = Components.fresh(model, Shape(), 0), Student(model, keep_all=True), Student(model)
    warm(model, student, components)
    arms = {}
    for count in options.questions:
        each = lessons_of(model, 1, count)[0]
        arms[count] = each, drawn_targets(model, [each])[0]
    seen: dict[int, list[dict[str, float]]] = {count: [] for count in arms}
    for _ in range(options.rounds):
        for count, (each, targets) in arms.items():
            checkpointed = _step(model, least, components, each, targets)["step"]
            seen[count].append({**_step(model, student, components, each, targets), "checkpointed_step": checkpointed})
            print(count, seen[count][-1], flush=True)
    rows = []
    for count, (each, targets) in arms.items():
        gflop, least_gflop = (_gflop(model, s, components, each, targets) for s in (student, least))
        stages = {name: round(statistics.median(step[name] for step in seen[count]), 3) for name in seen[count][0]}
        row = {
            "questions": count,
            "document_tokens": sum(map(len, each.documents)),
            "reader_rows": Branches.of(each.questions, [t.answer for t in targets]).ids.shape[1],
            "gflop": round(gflop, 1),
            "checkpointed_gflop_ratio": round(least_gflop / gflop, 3),
            "checkpointed_seconds_ratio": round(stages["checkpointed_step"] / stages["step"], 3),
            **{f"{name}_seconds": value for name, value in stages.items()},
            "seconds_per_question": round(stages["step"] / count, 3),
            "questions_per_wall_second": round(count / stages["wall"], 3),
            "gflop_per_second": round(gflop / stages["step"], 1),
        }
        if not options.no_teacher:
            began = time.process_time()
            Teacher(hidden=True).targets(model, each)
            row["teacher_seconds"] = round(time.process_time() - began, 3)
        rows.append(row)
    most = max(arms)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        _step(model, student, components, *arms[most])
    result = {
        **environment(),
        "model": options.model_name or portable(options.model),
        "dtype": "float32",
        "documents": 5,
        "rounds": options.rounds,
        "rows": rows,
        f"share_of_time_with_{most}_questions": _shares(found),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _step(
    model: LanguageModel, student: Student, components: Components, each: Lesson, targets: list[Target]
) -> dict[str, float]:
    """Seconds by stage; the stages follow one another."""
    branches = Branches.of(each.questions, [t.answer for t in targets])
    ticks: list[float] = []

    def tick(*_: object) -> None:
        ticks.append(time.process_time())

    def loss(_: int, read: Read) -> torch.Tensor:
        tick()
        total = loss_of(read, branches, targets)
        tick()
        return total

    reader = model.hf.register_forward_pre_hook(tick)  # the writer's pass runs the layers alone
    try:
        with frozen(model):
            began = time.perf_counter()
            tick()
            student.learn(components.parts(), [each], [branches], loss, hidden=True)
            tick()
            wall = time.perf_counter() - began
    finally:
        reader.remove()
    for p in components.trained.values():
        p.grad = None
    stages = {name: ticks[n + 1] - ticks[n] for n, name in enumerate(_STAGES)}
    return {**stages, "step": ticks[-1] - ticks[0], "wall": wall}


def _gflop(
    model: LanguageModel, student: Student, components: Components, each: Lesson, targets: list[Target]
) -> float:
    with FlopCounterMode(display=False) as counter:
        _step(model, student, components, each, targets)
    return float(counter.get_total_flops() / 1e9)


def _shares(found: profile) -> dict[str, float]:
    """Of the time on the CPU, by operator."""
    own: dict[str, Any] = {each.key: each.self_cpu_time_total for each in found.key_averages()}
    total = sum(own.values())
    largest = sorted(own.items(), key=lambda pair: -pair[1])[:_TOP]
    return {name: round(value / total, 4) for name, value in largest}


if __name__ == "__main__":
    main()
