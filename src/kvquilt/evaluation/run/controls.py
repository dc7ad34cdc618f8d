"""The controls of a run, tried on one item before anything is measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvquilt.endpoints import Check, check_endpoints
from kvquilt.errors import UnsupportedModelError
from kvquilt.evaluation.run.arms import FULL, Arm
from kvquilt.evaluation.run.self_transfer import check_method
from kvquilt.evaluation.tasks.item import Item
from kvquilt.retrieval import ranked_documents

if TYPE_CHECKING:
    from kvquilt.engine import Engine

log = logging.getLogger(__name__)


def tried(engine: Engine, item: Item, arms: Sequence[Arm]) -> dict[str, list[dict[str, Any]]]:
    """Checks by arm, as JSON; those of the model as a whole stand under ``full``.

    Raises:
        UnsupportedModelError: one of the latter fails, so that no method means anything on this model.
    """
    documents = list({document.text: document for document in item.documents}.values())
    checks = check_endpoints(engine, documents)
    if wrong := [check.name for check in checks if not check.passed]:
        raise UnsupportedModelError(f"{engine.model.name}: endpoint checks failed: {', '.join(wrong)}")
    runs = engine.prompt(item.question, documents).runs(engine.model.tokenizer)
    ranking = ranked_documents(item.question, [run.document for run in runs if run.document is not None])
    found, known = {FULL: checks}, dict[tuple[Any, ...], list[Check]]()
    for method, name in ((arm.method, arm.name) for arm in arms if arm.method.reuses):
        # neither control asks the selector or the correction, so these decide what it finds
        same = method.order, method.moved, method.needs_ranking, method.writer
        if same not in known:
            known[same] = check_method(engine, method, runs, ranking)
        found[name] = known[same]
    return {name: [asdict(check) for check in each] for name, each in found.items()}


def failed(controls: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Why nothing may be reported of some arms."""
    out = {}
    for name, checks in controls.items():
        wrong = [f"{c['name']} (KL {c['value']:.2g}, at most {c['limit']:.2g})" for c in checks if not c["passed"]]
        if wrong:
            out[name] = f"it must equal full prefill, and does not: {', '.join(wrong)}"
            log.warning("%s is not measured: %s", name, out[name])
    return out
