"""The objects that OpenAI's clients read: completions, chunks of them, usage."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvquilt.answer import Answer
from kvquilt.server.account import account, cached_tokens

FINISH = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


def usage(answer: Answer) -> dict[str, Any]:
    """Tokens as OpenAI counts them: `cached_tokens` are among the prompt's."""
    prompt, new = answer.prompt_tokens, len(answer.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(answer.ledger)},
    }


class Form(Protocol):
    """How one of the two kinds of completion writes its choice."""

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    @property
    def prefix(self) -> str: ...

    def whole(self, text: str) -> dict[str, Any]: ...

    def opening(self) -> dict[str, Any] | None: ...

    def piece(self, text: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ChatForm:
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    prefix: str = "chatcmpl"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


@dataclass(frozen=True, slots=True)
class TextForm:
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"
    prefix: str = "cmpl"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}


@dataclass(frozen=True, slots=True)
class Shape:
    """One completion in its form.

    Attributes:
        with_usage: a last chunk carries the usage, and all others say null.
        explain: the account holds the ledger as a table, too.
    """

    form: Form
    id: str
    model: str
    with_usage: bool
    explain: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = self._choice(self.form.whole(answer.text), FINISH[answer.stop_reason])
        named = self._named(self.form.whole_object, [choice])
        return {**named, "usage": usage(answer), "kvquilt": account(answer, self.explain)}

    def opening(self) -> list[bytes]:
        first = self.form.opening()
        return [] if first is None else [self._chunk(self._choice(first))]

    def piece(self, text: str) -> bytes:
        return self._chunk(self._choice(self.form.piece(text)))

    def ending(self, answer: Answer) -> list[bytes]:
        """The chunk with the reason and the account, the one with the usage, and the mark of the end."""
        choice = self._choice(self.form.piece(""), FINISH[answer.stop_reason])
        out = [self._chunk(choice, kvquilt=account(answer, self.explain))]
        if self.with_usage:
            out.append(event({**self._named(self.form.chunk_object, []), "usage": usage(answer)}))
        return [*out, b"data: [DONE]\n\n"]

    def _choice(self, what: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, **what, "logprobs": None, "finish_reason": reason}

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        nothing = {"usage": None} if self.with_usage else {}
        return event({**self._named(self.form.chunk_object, [choice]), **nothing, **more})

    def _named(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"{self.form.prefix}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"
