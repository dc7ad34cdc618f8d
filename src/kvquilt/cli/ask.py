"""`kvquilt ask`: retrieve passages, answer with them, name them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvquilt.cli.common import (
    BudgetFlag,
    Device,
    Dtype,
    ExitCode,
    HelperFlag,
    Json,
    MethodFlag,
    ModelFlag,
    Tenant,
    Threads,
    WriterFlag,
    echo_json,
    settings_of,
    warn,
    width,
)
from kvquilt.cli.work import check_helper, check_path, check_writers, open_engine, passages_in
from kvquilt.errors import InputError
from kvquilt.ledger import FallbackReason, Ledger

LAST_ANSWER = "last-answer.json"


def ask(
    context: typer.Context,
    question: Annotated[str, typer.Argument(metavar="QUESTION")],
    docs: Annotated[Path, typer.Option("--docs", metavar="DIR", help="Folder (or one file) with documents.")],
    top_k: Annotated[int | None, typer.Option(metavar="N", help="Passages to retrieve.")] = None,
    method: MethodFlag = None,
    budget: BudgetFlag = None,
    policy: Annotated[
        str | None, typer.Option(metavar="POLICY", help="auto obeys the gate (for method auto); always does not.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show what was reused and spent, and why not.")] = False,
    model: ModelFlag = None,
    helper_model: HelperFlag = None,
    writer: WriterFlag = None,
    tenant: Tenant = None,
    max_new_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest answer in tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of sampling, for temperature > 0.")] = None,
    passage_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest passage in tokens.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Answer QUESTION from the documents of DIR: BM25 picks passages, their compiled caches are reused.

    Exit code 5 means: the answer is there, but the reuse asked for did not happen; --explain says why.
    """
    settings, _ = settings_of(
        context, top_k=top_k, method=method, budget=budget, policy=policy, model=model,
        helper_model=helper_model, tenant=tenant, max_new_tokens=max_new_tokens, passage_tokens=passage_tokens,
        dtype=dtype, device=device, threads=threads,
    )  # fmt: skip
    if not question.strip():
        raise InputError("question", "must not be empty")
    check_path(docs)
    from kvquilt.policy import needs_verdict, written_method

    # before a model is loaded for nothing
    asked = written_method(settings.method, budget, settings.budget)
    needs_verdict(asked, settings.policy)
    check_helper([asked], settings)
    check_writers([asked], writer or ())
    with open_engine(settings, writer or ()) as engine:
        from kvquilt.retrieval import top_k as best

        passages = best(question, passages_in(docs, settings, engine.model.tokenizer).documents, settings.top_k)
        stream = engine.stream(
            question, documents=passages, method=settings.method, budget=budget, policy=settings.policy,
            max_new_tokens=settings.max_new_tokens, temperature=temperature, seed=seed, tenant=settings.tenant,
        )  # fmt: skip
        with stream:
            for piece in stream:
                if not json_output:
                    typer.echo(piece, nl=False)
        answer = stream.answer
    ledger = answer.ledger
    used = [{"id": passage.id, "score": passage.score} for passage in passages]
    _remember(settings.cache_dir, ledger, used)
    if json_output:
        said = {"text": answer.text, "token_ids": answer.token_ids, "stop_reason": answer.stop_reason}
        echo_json({**said, "prompt_tokens": answer.prompt_tokens, "passages": used, **_account(ledger)})
    else:
        typer.echo("\n\nfrom: " + ", ".join(f"{each['id']} ({each['score']:.2f})" for each in used))
        if explain:
            typer.echo("\n" + ledger.table(width()))
    for fallback in ledger.fallbacks:
        warn(f"{fallback.reason}: {fallback.detail}")
    if reuse_failed(ledger.asked, ledger):
        raise typer.Exit(ExitCode.NO_REUSE)


def reuse_failed(asked: str, ledger: Ledger) -> bool:
    """Whether reuse was expected and did not happen: another method than `asked` ran, or nothing could be reused.

    `auto` expects only what the gate allows, so going to full prefill on its verdict is no failure.
    """
    explicit = asked not in ("auto", "full") and ledger.method != asked
    return explicit or any(fallback.reason == FallbackReason.NOTHING_REUSED for fallback in ledger.fallbacks)


def _account(ledger: Ledger) -> dict[str, Any]:
    return {"method": ledger.method, "model": ledger.model, "spending": _spent(ledger), "ledger": ledger.as_dict()}


def _spent(ledger: Ledger) -> dict[str, Any] | None:
    """The spending with what follows from it."""
    if (spent := ledger.spending) is None:
        return None
    shares = {"nominal_share": spent.nominal_share, "charged_share": spent.charged_share}
    return {**asdict(spent), "charged": spent.charged, **shares}


def _remember(cache_dir: Path, ledger: Ledger, used: list[dict[str, Any]]) -> None:
    """Keep the account for `kvquilt explain`: ids and numbers, no text of documents, question or answer."""
    from kvquilt.files import write_atomically

    content = {"time": time.time(), "passages": used, **_account(ledger)}
    try:
        # private: it names what somebody has read
        write_atomically(cache_dir / LAST_ANSWER, json.dumps(content, indent=2).encode(), private=True)
    except OSError as error:
        warn(f"the account of this answer could not be kept in {cache_dir}: {error.strerror}")
