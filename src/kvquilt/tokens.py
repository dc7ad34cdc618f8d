"""From the text of one part to its token ids.

Three things make "each part alone, then concatenated" harder than it sounds, and all three live here:

- a user's text may spell control tokens; they stay text;
- sentencepiece-like tokenizers put a space before whatever they are given; only the first part may get it;
- a beginning-of-text token belongs to the prompt, not to a part.
"""

from __future__ import annotations

import json
import re
import threading
from functools import lru_cache
from typing import Any, Protocol

from kvquilt.errors import PromptError

Span = tuple[int, int]  # characters of a text: first, last + 1
_REMEMBERED = 1024  # documents whose ids are kept: tokenising a long prompt anew would cost as much as placing it
_PROBES = ("a", " a", "  a ", "\na", "\n\na", ".", "é日🙂")


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer; stated so that this module need not import transformers."""

    bos_token_id: int | None
    unk_token_id: int | None
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, Any]
    chat_template: Any

    def __call__(self, text: str, **kwargs: Any) -> Any: ...

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...

    def get_chat_template(self, *args: Any, **kwargs: Any) -> str: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class Encoder:
    """Ids of single parts under one tokenizer. Safe to use from several threads.

    Attributes:
        bos: the beginning-of-text id that the tokenizer itself puts before a text, or ``None`` if it puts none.

    Raises:
        PromptError: at construction, if parts tokenised alone do not join to the text (word-piece tokenizers, whose
            decoder writes spaces of its own).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # the flag for control tokens is state of the tokenizer's backend
        self._control = _control_tokens(tokenizer)
        self._unknown = _unknown(tokenizer)
        self._cuts = _pattern(text for text in self._control.values() if len(text) > 1)
        self._added = _pattern(token.content for token in tokenizer.added_tokens_decoder.values())
        self._inner: Any = None
        self.bos = _default_bos(tokenizer)
        self._segment = lru_cache(maxsize=_REMEMBERED)(self._encode_document)
        self._spans = lru_cache(maxsize=_REMEMBERED)(self._trace)
        if not self._joins():
            self._inner = _without_prefix_space(tokenizer)
            if self._inner is None or not self._joins():
                rule = "parts tokenised alone must join to the text; this tokenizer adds text of its own between them"
                raise PromptError("tokenizer", rule, type(tokenizer).__name__)

    def encode(self, text: str, *, control: bool = False, front: bool = False) -> tuple[int, ...]:
        """Ids of `text` without special tokens added around it.

        Args:
            control: parse control tokens (template text); otherwise they stay text.
            front: `text` begins the prompt, so that a tokenizer that opens every text with a space may do so.

        Raises:
            PromptError: a control token cannot be kept as text.
        """
        if not text:
            return ()
        if control:
            return tuple(self._template(text, front))
        ids = self._raw(text, front, split=True)
        if not self._control.keys().isdisjoint(ids):
            ids = [i for n, piece in enumerate(self._cut(text)) for i in self._raw(piece, front and n == 0, split=True)]
            for found in (self._control.keys() - self._unknown) & set(ids):
                rule = "a control token must stay text, but this tokenizer has no other spelling for it"
                raise PromptError("text", rule, self._control[found])
        return tuple(ids)

    def segment(self, text: str, end: str, tenant: str | None = None) -> tuple[int, ...]:
        """Ids of a document's text and end, remembered for the last documents seen.

        Args:
            tenant: whose document it is; what is remembered of one tenant's makes nothing faster for another.
        """
        return self._segment(text, end, tenant)

    def spans(self, text: str, tenant: str | None = None) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Ids of `encode(text)` and the characters that each comes from, as the tokenizer tells them; remembered, too.

        Several ids may come from one character, and some characters from no id; see `kvquilt.offsets`.

        Raises:
            PromptError: as `encode`; or the tokenizer gives other ids where it tells characters.
        """
        return self._spans(text, tenant)

    def _trace(self, text: str, _: str | None) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        ids = self.encode(text)
        found, spans = self._raw_spans(text) if text else ([], [])
        if tuple(found) != ids:  # cut at control tokens, as `encode` does it
            found, spans, at = [], [], 0
            for piece in self._cut(text):
                some, where = self._raw_spans(piece)
                found, spans = found + some, spans + [(first + at, last + at) for first, last in where]
                at += len(piece)
        if tuple(found) != ids:
            rule = "this tokenizer gives other tokens where it tells which characters they come from"
            raise PromptError("tokenizer", rule, type(self._tokenizer).__name__)
        return ids, tuple(spans)

    def _encode_document(self, text: str, end: str, _: str | None) -> tuple[int, ...]:
        return self.encode(text + end)

    def _template(self, text: str, front: bool) -> list[int]:
        match = self._added.search(text) if self._inner is not None and not front else None
        if self._inner is None or front:
            return self._raw(text, True, split=False)
        # From its first control token on, the template reads as in one piece: some tokenizers put a space behind
        # every control token, and the model was trained on those ids.
        head = text[: match.start()] if match else text
        ids = self._raw(head, False, split=False) if head else []
        return ids + (self._raw(text[match.start() :], True, split=False) if match else [])

    def _raw(self, text: str, front: bool, split: bool) -> list[int]:
        with self._lock:
            if front or self._inner is None:
                out = self._tokenizer(
                    text, add_special_tokens=False, split_special_tokens=split, truncation=False, padding=False,
                    return_attention_mask=False, return_token_type_ids=False, verbose=False,
                )  # fmt: skip
                return list(out["input_ids"])
            self._inner.encode_special_tokens = split
            return list(self._inner.encode(text, add_special_tokens=False).ids)

    def _raw_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """As `_raw` behind other text, with control tokens as text."""
        with self._lock:
            if self._inner is not None:
                self._inner.encode_special_tokens = True
                encoding = self._inner.encode(text, add_special_tokens=False)
                return list(encoding.ids), list(encoding.offsets)
            out = self._tokenizer(
                text, add_special_tokens=False, split_special_tokens=True, truncation=False, padding=False,
                return_attention_mask=False, return_token_type_ids=False, return_offsets_mapping=True, verbose=False,
            )  # fmt: skip
        return list(out["input_ids"]), [(int(first), int(last)) for first, last in out["offset_mapping"]]

    def _cut(self, text: str) -> list[str]:
        """The text cut behind the first character of every control token in it, overlapping ones too."""
        ends = [match.start() + 1 for match in self._cuts.finditer(text)]
        return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]

    def _joins(self) -> bool:
        """Whether parts decode together as the whole text does, which need not be lossless itself (NFC, lower case)."""
        before = self._raw("x", True, split=True)
        joined = [self._text(before + self._raw(probe, False, split=True)) for probe in _PROBES]
        return joined == [self._text(self._raw("x" + probe, True, split=True)) for probe in _PROBES]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def encoder(tokenizer: Tokenizer) -> Encoder:
    """The tokenizer's `Encoder`, made once and again when its vocabulary or template has changed."""
    return _encoder(tokenizer, len(tokenizer), str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _encoder(tokenizer: Tokenizer, size: int, template: str) -> Encoder:
    return Encoder(tokenizer)


def _control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Special tokens, and other added ones that the template writes (``<think>``); not plain ones (``<h1>``)."""
    template = str(tokenizer.chat_template or "")
    special = set(tokenizer.all_special_ids)
    return {
        i: str(token.content)
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special or i in special or (token.content in template and not token.content.isspace())
    }


def _unknown(tokenizer: Tokenizer) -> set[int]:
    """The id for characters that the vocabulary lacks, unless it has another meaning too (GPT-2: end of text)."""
    others = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {i for i in [tokenizer.unk_token_id] if i is not None and i not in others}


def _pattern(texts: Any) -> re.Pattern[str]:
    """Matches, without consuming, where any of `texts` begins; nowhere if there is none."""
    return re.compile("|".join(f"(?={re.escape(text)})" for text in sorted(texts)) or "(?!)")


def _default_bos(tokenizer: Tokenizer) -> int | None:
    ids = list(tokenizer("a", verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    return bos if bos is not None and ids[:1] == [bos] else None


def _without_prefix_space(tokenizer: Tokenizer) -> Any:
    """A copy of the backend that puts no space before a text; ``None`` for tokenizers without a backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    state = json.loads(backend.to_str())
    for step in ("normalizer", "pre_tokenizer"):
        state[step] = _strip_prefix(state[step])
    copy = type(backend).from_str(json.dumps(state))
    copy.no_truncation()
    copy.no_padding()
    return copy


def _strip_prefix(node: Any) -> Any:
    if not isinstance(node, dict) or node.get("type") == "Prepend":
        return None
    kind = node.get("type")
    if kind == "Metaspace":
        return {**node, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**node, "add_prefix_space": False}
    for children in ("normalizers", "pretokenizers"):
        if children in node:
            return {**node, children: [kept for child in node[children] if (kept := _strip_prefix(child)) is not None]}
    return node
