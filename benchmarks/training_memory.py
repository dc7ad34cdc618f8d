"""Memory of one training step with and without KV gradient checkpointing, and what it costs in time.

Every arm runs in a process of its own: `batch` exercises of five biographies, gradients of a LoRA writer and of the
dense objective. Answers and states of the teacher are drawn, since they change no size. Reported per arm:

- the peak of resident memory over what the process held before the step (of the GPU where there is one),
- the most that autograd kept at once, counted exactly at its hooks; without what a layer keeps while it runs again.

Processor seconds stand beside the wall's, which say nothing on a busy machine.

    python benchmarks/training_memory.py --model PATH --json OUT.json [--batches 1 8] [--questions 1 8]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from training_set import drawn_targets, lessons_of, loss_of, warm

from kvquilt.bench import environment, portable
from kvquilt.config import Settings
from kvquilt.model.graph import frozen
from kvquilt.model.load import load_model
from kvquilt.training.components import Components
from kvquilt.training.shape import Shape
from kvquilt.training.student import Student
from kvquilt.training.teacher import Branches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", help="how the model is called in the result")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(_arm(options, **json.loads(options.arm))))
        return
    rows = []
    for questions in options.questions:
        for batch in options.batches:
            arms = {
                name: _in_process({"batch": batch, "questions": questions, "keep_all": name == "direct"})
                for name in ("direct", "checkpointed")
            }
            ratios = {f"{k}_ratio": round(arms["checkpointed"][k] / arms["direct"][k], 3) for k in arms["direct"]}
            rows.append({"batch": batch, "questions": questions, **arms, **ratios})
            print(rows[-1], flush=True)
            if options.json:
                result = {
                    **environment(),
                    "threads": options.threads,
                    "device": options.device,
                    "model": options.model_name or portable(options.model),
                    "dtype": "float32",
                    "documents": 5,
                    "rows": rows,
                }
                options.json.write_text(json.dumps(result, indent=1) + "\n")


def _in_process(arm: dict[str, Any]) -> dict[str, float]:
    # large blocks go back to the system at once: what stays resident is what is in use
    surroundings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, *sys.argv, "--arm", json.dumps(arm)]
    done = subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _arm(options: argparse.Namespace, batch: int, questions: int, keep_all: bool) -> dict[str, float]:
    model = load_model(options.model, "float32", options.device, options.threads, Settings.resolve()[0])
    lessons = lessons_of(model, batch, questions)
    targets = drawn_targets(model, lessons)
    branches = [Branches.of(e.questions, [t.answer for t in known]) for e, known in zip(lessons, targets, strict=True)]
    components = Components.fresh(model, Shape(), 0)
    student = Student(model, keep_all=keep_all)
    warm(model, student, components)
    kept, peak = _Kept(), _Peak(model.device)
    with frozen(model), torch.autograd.graph.saved_tensors_hooks(kept.pack, _Held.get):
        for p in model.hf.parameters():
            kept.ignore(p)
        peak.begin()
        began = time.perf_counter(), time.process_time()
        student.learn(
            components.parts(), lessons, branches, lambda n, read: loss_of(read, branches[n], targets[n]), True
        )
        seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        over = peak.end()
    return {
        "peak_mb": round(over / 1e6, 1),
        "kept_mb": round(kept.most / 1e6, 1),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
    }


class _Kept:
    """Bytes that autograd holds, a storage once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._held: Counter[int] = Counter()
        self._ignored: set[int] = set()

    def ignore(self, tensor: torch.Tensor) -> None:
        """The model's own weights."""
        self._ignored.add(tensor.untyped_storage().data_ptr())

    def pack(self, tensor: torch.Tensor) -> _Held:
        return _Held(self, tensor)

    def add(self, where: int, size: int, by: int) -> None:
        if where in self._ignored:
            return
        before = self._held[where]
        self._held[where] += by
        if bool(before) != bool(self._held[where]):
            self.now += by * size
            self.most = max(self.most, self.now)


class _Held:
    """One saved tensor; autograd drops it when it is done with it."""

    def __init__(self, kept: _Kept, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._kept, self._what = tensor, kept, (storage.data_ptr(), storage.nbytes())
        kept.add(*self._what, 1)

    def get(self) -> torch.Tensor:
        return self.tensor

    def __del__(self) -> None:
        self._kept.add(*self._what, -1)


class _Peak:
    """The most memory between `begin` and `end` over what was held at `begin`, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._before = 0

    def begin(self) -> None:
        gc.collect()
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
            return
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self._before = _status("VmRSS")

    def end(self) -> int:
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda) - self._before
        return _status("VmHWM") - self._before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
