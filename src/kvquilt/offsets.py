"""One text under two tokenizers: which tokens of the one overlap which of the other, by characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvquilt.errors import PromptError
from kvquilt.model.parts import SOFT
from kvquilt.prompt import Run
from kvquilt.tokens import Encoder, Span, Tokenizer, encoder


@dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt as another tokenizer reads it.

    Attributes:
        ids: all of it, with a beginning-of-text token where that tokenizer opens texts with one.
        spans: where each run's ids stand in `ids`, in the order of the runs.
    """

    ids: tuple[int, ...]
    spans: tuple[range, ...]


def render(runs: Sequence[Run], ours: Tokenizer, theirs: Tokenizer) -> Rendering:
    """The prompt that `runs` spell under the tokenizer `ours`, tokenised by `theirs`, run by run.

    A document is its text; inline text is decoded from its ids, none left out. A control token is the control token
    of the same text where `theirs` has one, else its text; what a user wrote stays text. The beginning-of-text token
    of `ours` becomes that of `theirs`.

    Raises:
        PromptError: a text cannot be tokenised faithfully.
    """
    read = encoder(theirs)
    ids: list[int] = [] if read.bos is None else [read.bos]
    start, spans = len(ids), list[range]()
    for n, run in enumerate(runs):
        first = len(ids)
        if run.document is not None:
            ids += read.segment(run.document.text, run.document.end, run.document.tenant)
        elif run.ids[0] < SOFT:  # soft tokens spell nothing
            ids += _inline(run.ids, ours, theirs, front=n == 0)
        if n == 0 and read.bos is not None and ids[start:][:1] == [read.bos]:
            del ids[start]  # a template that writes it by itself
        spans.append(range(first, len(ids)))
    return Rendering(tuple(ids), tuple(spans))


def _inline(ids: tuple[int, ...], ours: Tokenizer, theirs: Tokenizer, front: bool) -> list[int]:
    written, read = encoder(ours), encoder(theirs)
    out: list[int] = []
    known = {token.content: i for i, token in theirs.added_tokens_decoder.items()}
    if front and ids[:1] == (written.bos,):
        ids = ids[1:]
    stretch: list[int] = []
    for i in (*ids, None):
        added = ours.added_tokens_decoder.get(i) if i is not None else None
        if i is not None and (added is None or added.content not in known):
            stretch.append(i)
            continue
        if stretch:
            out += read.encode(_text(stretch, ours, written, front), front=front)
            stretch, front = [], False
        if added is not None:
            out.append(known[added.content])
            front = False
    return out


def _text(ids: list[int], tokenizer: Tokenizer, written: Encoder, front: bool) -> str:
    """What the ids spell; behind other text, where a decoder must not drop the space that they begin with."""
    before = [] if front else list(written.encode("x", front=True))
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(before + ids, **options))[len(str(tokenizer.decode(before, **options))) :]


def document_spans(run: Run, tokenizer: Tokenizer) -> tuple[Span, ...]:
    """The characters of the document's text and end that each of the run's tokens comes from.

    Raises:
        PromptError: the run's tokens are not those of the document's text.
    """
    if run.document is None:
        raise ValueError("inline text has no document")
    ids, spans = encoder(tokenizer).spans(run.document.text + run.document.end, run.document.tenant)
    if ids != run.ids:
        rule = "the document's text cannot be aligned with its tokens: the tokenizer makes others of it"
        raise PromptError("helper_model", rule, run.document.id)
    return spans


def carried_over(scores: torch.Tensor, theirs: Sequence[Span], ours: Sequence[Span], length: int) -> torch.Tensor:
    """Scores of the tokens of one tokenizer as scores of another's: of those that overlap a token, the largest.

    Args:
        scores: ``[T]`` of the tokens whose characters are `theirs`.
        theirs, ours: ascending characters of every token of the same text, which has `length` characters.

    Returns:
        ``[O]``; zeros where there are none to carry over.
    """
    if not theirs:
        return scores.new_zeros(len(ours))
    tokens, characters = _covered(theirs, length)
    each = scores.new_full((length,), -torch.inf).scatter_reduce(0, characters, scores[tokens], "amax")
    tokens, characters = _covered(ours, length)
    return scores.new_full((len(ours),), -torch.inf).scatter_reduce(0, tokens, each[characters], "amax")


def _covered(spans: Sequence[Span], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of a token and a character of it. Every character has a token and every token a character.

    Tokenizers leave characters out (spaces before a word, where offsets are trimmed; what a normaliser drops): they
    belong to the token behind them, or else to the last. Tokens without characters of their own get their neighbour's.
    """
    first, last = torch.tensor(spans, dtype=torch.int64).unbind(1)
    last = last.cummax(0).values
    last[-1] = length
    first = torch.cat((first.new_zeros(1), torch.minimum(first[1:], last[:-1]))).clamp(max=length - 1)
    widths = (last - first).clamp(min=1)
    tokens = torch.arange(len(spans)).repeat_interleave(widths)
    within = torch.arange(len(tokens)) - (widths.cumsum(0) - widths)[tokens]
    return tokens, first[tokens] + within
