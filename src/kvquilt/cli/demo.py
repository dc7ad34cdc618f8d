"""`kvquilt demo`: what reuse does, in a minute, on texts that every Python carries."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import typer

from kvquilt.cli.common import (
    Device,
    Dtype,
    Json,
    ModelFlag,
    Threads,
    echo_json,
    echo_table,
    progress,
    settings_of,
    size,
    width,
)
from kvquilt.cli.doctor import show_report
from kvquilt.cli.models import EMBEDDED
from kvquilt.cli.work import open_engine

if TYPE_CHECKING:
    from kvquilt.answer import Answer
    from kvquilt.engine import Engine
    from kvquilt.prompt import Document

_TOPICS = ("with", "try", "assert", "for", "while", "import", "del", "global")
_QUESTIONS = (
    "What does the with statement do?",
    "What does the assert statement do?",
    "What does the global statement do?",
)
_METHODS = ("full", "none", "retrieved-document")
_ANSWER_TOKENS = 40
_TENANT = "demo"  # its verdict must not speak for the user's own documents


def demo(
    context: typer.Context,
    model: ModelFlag = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Compile help topics of the Python standard library and ask about them, in three orders."""
    settings, _ = settings_of(context, model=model, dtype=dtype, device=device, threads=threads)
    say = (lambda *a, **k: None) if json_output else typer.echo
    with open_engine(settings) as engine:
        documents = demo_documents()
        say(f"model {engine.model.name}, {engine.model.threads} threads; {len(documents)} help topics of Python\n")
        with progress("compiling") as advance:
            report = engine.compile(documents, tenant=_TENANT, progress=advance)
        say(f"compiled {report.compiled} documents, {report.stored_before} were in the store already")
        if report.gate is not None and not json_output:
            show_report(report.gate, engine.tuned(_TENANT))
        _ask(engine, documents, _QUESTIONS[0], "full", lambda *a, **k: None)  # warms kernels for every shape
        rows, answers = [], []
        for n, question in enumerate(_QUESTIONS):
            order = documents[n * 3 :] + documents[: n * 3]
            say(f"\n{n + 1}. {question}   (order: {', '.join(d.id for d in order)})")
            asked = {method: _ask(engine, order, question, method, say) for method in _METHODS}
            rows.append({"order": n + 1, "question": question, **_times(asked)})
            rows[-1]["exact_prefix_ms"] = _prefix_hit_ms(engine, order, question)
            answers.append(asked)
        stats = engine.store.stats()["disk"]
        place = {"directory": str(settings.store_dir), "segments": stats.segments, "bytes": stats.bytes}
        if json_output:
            texts = [{m: a.text for m, a in asked.items()} for asked in answers]
            echo_json({"model": engine.model.name, "threads": engine.model.threads, "orders": rows, "answers": texts,
                       "ledger": answers[0]["retrieved-document"].ledger.as_dict(), "store": place})  # fmt: skip
            return
        _show(rows, answers, place)
        if settings.model == EMBEDDED:
            say("SmolLM2-135M is a weak model, good for showing the mechanics; use a stronger one for answers.")


def demo_documents() -> list[Document]:
    """The beginnings of some help topics of Python."""
    from pydoc_data.topics import topics

    from kvquilt.prompt import Document

    return [Document(topics[name].strip()[:1500].rstrip(), id=name) for name in _TOPICS]


def _ask(engine: Engine, documents: list[Document], question: str, method: str, say: Any) -> Answer:
    """One streamed answer."""
    say(f"   {method:>19}: ", nl=False)
    with engine.stream(question, documents, method=method, tenant=_TENANT, max_new_tokens=_ANSWER_TOKENS) as stream:
        for piece in stream:
            say(piece.replace("\n", " "), nl=False)
    say("")
    return stream.answer


def _times(asked: dict[str, Answer]) -> dict[str, float]:
    ms = {method: answer.ledger.seconds["first_token"] * 1e3 for method, answer in asked.items()}
    return {"full_ms": ms["full"], "none_ms": ms["none"], "retrieved_document_ms": ms["retrieved-document"]}


def _prefix_hit_ms(engine: Engine, documents: list[Document], question: str) -> float:
    """The floor: the question alone on a cache that a prefix cache would have found ready, because nothing moved."""
    import time

    from kvquilt.placement import place_runs
    from kvquilt.repair.operator import repair

    placement = place_runs(engine.prompt(question, documents).runs(engine.model.tokenizer))
    cache = engine.ask(question, documents, method="none", tenant=_TENANT, max_new_tokens=1).take_cache()
    began = time.perf_counter()
    repair(engine.model, cache, placement.ids, [placement.span(len(placement.runs) - 1)])
    elapsed = time.perf_counter() - began
    engine.model.pool.release(cache)
    return elapsed * 1e3


def _show(rows: list[dict[str, Any]], answers: list[dict[str, Answer]], place: dict[str, Any]) -> None:
    typer.echo("\nTime to the first token, milliseconds (how many times sooner than full prefill)\n")
    names = ("exact_prefix_ms", "none_ms", "retrieved_document_ms")
    table = [
        (str(r["order"]), f"{r['full_ms']:.0f}", *(f"{r[n]:.0f} ({r['full_ms'] / r[n]:.1f}x)" for n in names))
        for r in rows
    ]
    medians = [statistics.median(r["full_ms"] / r[n] for r in rows) for n in names]
    table.append(("median", "", *(f"{m:.1f}x" for m in medians)))
    echo_table(("order", "full", "exact prefix hit", "none", "retrieved-document"), table)
    typer.echo("\nAn exact prefix hit needs the same documents in the same order as before; the other two do not.")
    typer.echo("\nWhat the last answer reused:\n")
    typer.echo(answers[-1]["retrieved-document"].ledger.table(width()))
    same = {m: sum(a[m].text == a["full"].text for a in answers) for m in _METHODS[1:]}
    typer.echo(
        f"Pure reuse (none) changes answers: {same['none']} of {len(answers)} are word for word those of full prefill, "
        f"with retrieved-document {same['retrieved-document']}.\nNo document saw the others when it was compiled. "
        "retrieved-document repairs this for the document that matters most,\nat the price in the table of times. "
        "`kvquilt doctor` measures on your own documents which of them is safe."
    )
    typer.echo(f"\nThe store is {place['directory']}: {place['segments']} segments, {size(place['bytes'])}.")
