"""Whether documents and prompts fit into the model's context, and what to do where they do not."""

from __future__ import annotations

from collections.abc import Sequence

from kvquilt.errors import ContextLengthError
from kvquilt.model.capability import Capability
from kvquilt.model.parts import SOFT
from kvquilt.placement import Placement
from kvquilt.prompt import Document, Run

_NAMED = 8  # documents in a message


def check_document_fits(capability: Capability, document: Document, tokens: int, behind: int) -> None:
    """Raise `ContextLengthError` if `tokens`, encoded behind a prefix of `behind` tokens, exceed the context."""
    over = behind + tokens - capability.max_length
    if over > 0:
        raise ContextLengthError(
            "documents", f"{document.id!r} is {over} tokens longer than {_context(capability)}; split it"
        )


def check_prompt_fits(capability: Capability, runs: Sequence[Run], new: int) -> None:
    """Raise `ContextLengthError` if the prompt and `new` answer tokens exceed the context, naming what to drop."""
    total = sum(len(r.ids) for r in runs)
    over = total + new - capability.max_length
    if over <= 0:
        return
    documents = sorted(((len(r.ids), r.document.id) for r in runs if r.document is not None), reverse=True)
    dropped, names = 0, []
    for tokens, name in documents:
        if dropped >= over:
            break
        names.append(f"{name!r} ({tokens} tokens)")
        dropped += tokens
    more = len(names) - _NAMED
    drop = ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    parts = [f"drop {drop}"] if documents else []
    parts += ["shorten the prompt or the answer"] if dropped < over else []
    hint = " and ".join(parts)
    raise ContextLengthError(
        "prompt", f"{total} prompt and {new} answer tokens exceed {_context(capability)} by {over}; {hint}"
    )


def check_placed_fits(capability: Capability, placement: Placement, new: int) -> None:
    """`check_prompt_fits` once it is known what writers put around documents."""
    tokens = sum(len(run.ids) for run in placement.runs if run.ids[0] < SOFT)
    if placement.tokens > tokens and placement.end + new > capability.max_length:
        soft = placement.tokens - tokens
        over = placement.end + new - capability.max_length
        around = f"with {soft} soft tokens around its documents and {new} new ones"
        raise ContextLengthError("prompt", f"{around} it exceeds {_context(capability)} by {over}")


def _context(capability: Capability) -> str:
    """The limit, and why it is less than the model's own context, if it is."""
    return f"the context of {capability.max_length}" + (f" ({capability.bound})" if capability.bound else "")
