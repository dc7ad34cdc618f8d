"""Time to first token, decoding and compiling, each beside plain transformers, as ratios within one run.

Arms take turns within every round, so a machine that slows down slows them all, and medians are reported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.errors import InputError, ModelError
from kvquilt.model.load import resolve
from kvquilt.placement import place_runs
from kvquilt.prompt import Document
from kvquilt.repair.operator import repair

_DECODE_TOKENS = 24
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TtftPlan:
    """What to measure: `documents` of equal length filling `context_tokens`, then about `question_tokens`.

    Raises:
        InputError: a field below its least value.
    """

    model: str = "smollm2"
    context_tokens: int = 4096
    documents: int = 16
    question_tokens: int = 32
    dtype: str | None = None
    threads: int | None = None
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, least in (("context_tokens", 64), ("documents", 1), ("question_tokens", 16), ("rounds", 1)):
            if getattr(self, name) < least:
                raise InputError(name, f"must be at least {least}", getattr(self, name))
        if self.context_tokens // self.documents < 16:
            raise InputError("documents", "must leave at least 16 tokens to each", self.documents)


def environment() -> dict[str, Any]:
    """What a reader needs to judge a figure: command, commit, versions, machine."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, check=True, cwd=Path(__file__).parent,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        commit = "not a git checkout"
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *map(portable, sys.argv[1:])]),
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def portable(argument: str) -> str:
    """The argument without the directories of a path that means something on this machine only.

    ``--json=/home/me/x.json`` becomes ``--json=x.json``, ``jsonl:~/x.jsonl,share=1`` ``jsonl:x.jsonl,share=1``;
    relative paths and Hugging Face ids stay.
    """
    if Path(argument).is_absolute():  # whatever signs are in it
        return Path(argument).name
    return re.sub(r"(^|[:=,;])((?:/(?!/)|~/|\.\./)[^:=,;]*)", lambda m: m[1] + Path(m[2]).name, argument)


def run_ttft(plan: TtftPlan, settings: Settings | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Measure `plan` in a temporary store: figures (milliseconds unless named otherwise), samples and ratios."""
    settings = settings or Settings.resolve()[0]
    say = progress or (lambda text: None)
    with tempfile.TemporaryDirectory(prefix="kvquilt-bench-") as folder:
        with open_engine(plan, settings, Path(folder)) as engine:
            documents, question = texts(engine, plan)
            say("compiling")
            engine.compile(documents, gate=False)
            samples = _first_tokens(engine, documents, question, plan.rounds, say)
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            say("decoding and compiling beside plain transformers")
            stock = _stock(plan, settings, engine.model.device)
            samples |= _decoding(engine, stock, documents, question, plan.rounds)
            samples |= _compiling(engine, stock, plan.rounds)
            tokens = len(engine.prompt(question, documents).ids(engine.model.tokenizer))
            threads = engine.model.threads
        say("reading from disk in fresh processes")
        samples["reuse_disk_ms"] = _from_disk(plan, settings, folder, documents, question)
    figures = {name: statistics.median(values) for name, values in samples.items()}
    return {
        **environment(),
        "plan": asdict(plan) | {"model": portable(plan.model)},
        "model": portable(plan.model),
        "seed": 0,
        "threads": threads,
        "prompt_tokens": tokens,
        **{name: round(value, 3) for name, value in figures.items()},
        "peak_rss_mb": round(rss, 1),
        "ratios": {name: round(value, 3) for name, value in _ratios(figures).items()},
        "samples": {name: [round(v, 3) for v in values] for name, values in samples.items()},
    }


def _ratios(f: dict[str, float]) -> dict[str, float]:
    return {
        "full / reuse_memory": f["full_ms"] / f["reuse_memory_ms"],
        "full / retrieved_document": f["full_ms"] / f["retrieved_document_ms"],
        "full / prefix_hit": f["full_ms"] / f["prefix_hit_ms"],
        "reuse_memory / prefix_hit": f["reuse_memory_ms"] / f["prefix_hit_ms"],
        "reuse_disk / prefix_hit": f["reuse_disk_ms"] / f["prefix_hit_ms"],
        "decode / stock_generate": f["decode_tok_s"] / f["stock_generate_tok_s"],
        "compile / stock_forward, 512-token documents": f["compile_tok_s"] / f["stock_forward_tok_s"],
        "compile / stock_forward, 64-token documents": f["compile_64_tok_s"] / f["stock_forward_64_tok_s"],
    }


def open_engine(plan: TtftPlan, settings: Settings, folder: Path) -> Engine:
    return Engine.load(
        plan.model, dtype=plan.dtype, threads=plan.threads, store_dir=folder / "store", settings=settings
    )


def texts(engine: Engine, plan: TtftPlan) -> tuple[list[Document], str]:
    """Documents cut from the standard library's help topics to the wanted number of tokens, and a question."""
    from pydoc_data.topics import topics

    size = plan.context_tokens // plan.documents
    text = "\n".join(topics[name].strip() for name in sorted(topics))
    offsets = engine.model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) < size * plan.documents:
        raise InputError("context_tokens", f"the built-in texts have {len(offsets)} tokens only", plan.context_tokens)
    cuts = [offsets[i * size][0] for i in range(plan.documents + 1)]
    parts = [text[a:b].rstrip("\n") for a, b in pairwise(cuts)]
    documents = [Document(part, id=f"topic-{i}") for i, part in enumerate(parts)]
    words = ["What", "does", "this", "say", "about"]
    while _question_tokens(engine, " ".join(words)) < plan.question_tokens:
        words.append(("statements", "and", "expressions", "or", "names")[len(words) % 5])
    return documents, " ".join(words)


def _question_tokens(engine: Engine, question: str) -> int:
    return len(engine.prompt(question, [Document("x")]).runs(engine.model.tokenizer)[-1].ids)


def _first_token_ms(engine: Engine, documents: list[Document], question: str, method: str) -> float:
    with engine.stream(question, documents, method=method, max_new_tokens=1) as stream:
        return stream.result().ledger.seconds["first_token"] * 1e3


def _first_tokens(
    engine: Engine, documents: list[Document], question: str, rounds: int, say: Progress
) -> dict[str, list[float]]:
    """Full prefill, the floor (the question on a ready cache), reuse from memory, one document recomputed."""
    placement = place_runs(engine.prompt(question, documents).runs(engine.model.tokenizer))
    tail = placement.span(len(placement.runs) - 1)
    with engine.stream(question, documents, method="none", max_new_tokens=1) as stream:
        ready = stream.result().take_cache()

    def prefix_hit() -> float:
        began = time.perf_counter()
        repair(engine.model, ready, placement.ids, [tail])
        return (time.perf_counter() - began) * 1e3

    arms: dict[str, Callable[[], float]] = {
        "prefix_hit_ms": prefix_hit,
        "reuse_memory_ms": lambda: _first_token_ms(engine, documents, question, "none"),
        "retrieved_document_ms": lambda: _first_token_ms(engine, documents, question, "retrieved-document"),
        "full_ms": lambda: _first_token_ms(engine, documents, question, "full"),
    }
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for n in range(rounds):
        say(f"first tokens, round {n + 1} of {rounds}")
        for name, arm in arms.items():
            arm()  # uncounted: it warms this arm's shapes and caches, which the arm before has just evicted
            samples[name].append(arm())
    engine.model.pool.release(ready)
    return samples


def _stock(plan: TtftPlan, settings: Settings, device: torch.device) -> Any:
    """Plain transformers, untouched by kvquilt, on the device that the engine runs on."""
    source = resolve(plan.model, plan.dtype, settings)
    dtype = getattr(torch, plan.dtype) if plan.dtype else "auto"
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval().to(device)


def _decoding(
    engine: Engine, stock: Any, documents: list[Document], question: str, rounds: int
) -> dict[str, list[float]]:
    """Tokens per second behind the same prompt: our loop, and `generate` from the same keys and values."""
    ids = engine.prompt(question, documents).ids(engine.model.tokenizer)
    ours: list[float] = []
    theirs: list[float] = []
    end = stock.generation_config.eos_token_id
    stock.generation_config.eos_token_id = None
    for _ in range(rounds):
        stops, engine.model.stop_ids = engine.model.stop_ids, frozenset()
        try:
            answer = engine.ask(question, documents, method="none", max_new_tokens=_DECODE_TOKENS)
        finally:
            engine.model.stop_ids = stops
        ours.append((len(answer.token_ids) - 1) / answer.ledger.seconds["decode"])
        slots = answer.take_cache()
        cache = DynamicCache()
        kept = len(ids) - 1
        for layer in range(len(engine.model.capability.tables)):
            cache.update(
                slots.slot_keys[layer, :, :, :kept].clone(), slots.slot_values[layer, :, :, :kept].clone(), layer
            )
        engine.model.pool.release(slots)
        began = time.perf_counter()
        with torch.inference_mode():
            stock.generate(
                torch.tensor([ids], device=stock.device), cache=cache,
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=stock.device),
                max_new_tokens=_DECODE_TOKENS, min_new_tokens=_DECODE_TOKENS, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        theirs.append(_DECODE_TOKENS / (time.perf_counter() - began))
    stock.generation_config.eos_token_id = end
    return {"decode_tok_s": ours, "stock_generate_tok_s": theirs}


def _compiling(engine: Engine, stock: Any, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of compiling to disk, and of plain forwards one by one that keep nothing."""
    samples: dict[str, list[float]] = {}
    limit = min(len(engine.model.tokenizer), stock.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    for size, count, suffix in ((512, 8, ""), (64, 32, "_64")):
        ours, theirs = f"compile{suffix}_tok_s", f"stock_forward{suffix}_tok_s"
        samples[ours], samples[theirs] = [], []
        for n in range(rounds + 1):
            ids = torch.randint(limit // 8, limit // 2, (count, size), generator=generator)
            segments = [tuple(row.tolist()) for row in ids]
            keys = [engine.reader.key(s, "bench") for s in segments]

            def compile_(missing: list[int], segments: Any = segments) -> Any:
                return engine.writer.compile(engine.model, [segments[i] for i in missing])

            began = time.perf_counter()
            with engine.store.fetch(list(zip(keys, segments, strict=True)), compile_):
                mine = time.perf_counter() - began
            began = time.perf_counter()
            with torch.inference_mode():
                for row in ids.to(stock.device):
                    stock(row[None], use_cache=True, logits_to_keep=1).logits.cpu()  # waits for an accelerator
            stock_seconds = time.perf_counter() - began
            if n:
                samples[ours].append(size * count / mine)
                samples[theirs].append(size * count / stock_seconds)
    return samples


def _from_disk(
    plan: TtftPlan, settings: Settings, folder: str, documents: list[Document], question: str
) -> list[float]:
    """First use of the stored segments in fresh processes: nothing in memory or verified yet, page cache warm."""
    context = multiprocessing.get_context("spawn")
    times = []
    for _ in range(plan.rounds):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (plan, settings, folder, [(d.id, d.text) for d in documents], question, theirs)
        child = context.Process(target=_disk_child, args=arguments)
        child.start()
        theirs.close()
        times.append(_received(ours, child))
    return times


def _received(pipe: Connection, child: BaseProcess) -> float:
    """The one number that `child` sends.

    Raises:
        ModelError: it ended without one, or badly after it; what it wrote to stderr says why.
    """
    try:
        value = float(json.loads(pipe.recv_bytes()))
    except EOFError:
        value = None
    child.join()
    if value is None or child.exitcode:
        raise ModelError(
            f"bench: the process that reads from disk ended with exit code {child.exitcode}; see its error above"
        )
    return value


def _disk_child(
    plan: TtftPlan, settings: Settings, folder: str, texts: list[tuple[str, str]], question: str, pipe: Any
) -> None:
    documents = [Document(text, id=name) for name, text in texts]
    with open_engine(plan, settings, Path(folder)) as engine:
        # a served model has run before: warm its kernels on the question's shape, over slots of no meaning
        placement = place_runs(engine.prompt(question, documents).runs(engine.model.tokenizer))
        with engine.model.pool.lend(placement.tokens + 1) as cache:
            cache.slot_keys.zero_()
            cache.slot_values.zero_()
            for _ in range(2):
                repair(engine.model, cache, placement.ids, [placement.span(len(placement.runs) - 1)])
        pipe.send_bytes(json.dumps(_first_token_ms(engine, documents, question, "none")).encode())
