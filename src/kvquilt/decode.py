"""From logits to text: sampling, incremental detokenisation, stop strings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens with at least this probability, in (0, 1].
        top_k: keep this many tokens; 0 keeps all.
        seed: of this answer's own generator, at least 0 and below 2**63; ``None`` draws one.
        stop: texts that end the answer; they are not part of it.
        max_new_tokens: longest answer.

    Raises:
        InputError: naming the field that breaks its rule.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0.0 <= self.temperature <= sys.float_info.max:
            raise InputError("temperature", "must be a finite number of at least 0", self.temperature)
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise InputError("top_p", "must be a number above 0 and at most 1", self.top_p)
        if not _is_integer(self.top_k) or self.top_k < 0:
            raise InputError("top_k", "must be a whole number of at least 0", self.top_k)
        if not _is_integer(self.max_new_tokens) or self.max_new_tokens < 1:
            raise InputError("max_new_tokens", "must be a whole number of at least 1", self.max_new_tokens)
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= self.seed < 1 << 63):
            raise InputError("seed", "must be a whole number of at least 0 and below 2**63, or None", self.seed)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise InputError("stop", "must be a sequence of non-empty strings")

    def generator(self) -> torch.Generator:
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """The next token id from fp32 logits ``[vocabulary]``."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        logits = logits.cpu()
        # the largest becomes 0, which no temperature can turn into infinity; below the smallest normal number it is 0
        scaled = (logits - logits.max()) / max(self.temperature, torch.finfo(logits.dtype).tiny)
        if 0 < self.top_k < scaled.numel():
            scaled = scaled.masked_fill(scaled < scaled.topk(self.top_k).values[-1], float("-inf"))
        probabilities = scaled.softmax(-1)
        if self.top_p < 1.0:
            ranked, order = probabilities.sort(descending=True, stable=True)
            # a token stays while the mass before it is below top_p; the first always does
            outside = order[1:][(ranked.cumsum(-1) - ranked)[1:] >= self.top_p]
            probabilities[outside] = 0.0
        return int(torch.multinomial(probabilities, 1, generator=generator))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Detokeniser:
    """Turns token ids into text pieces that are never revised.

    A character may span several tokens and a token's text may depend on the one before it, so text is held back while
    it ends in a replacement character, and each step decodes only a short window of ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0
        self._read = 0

    def push(self, token: int) -> str:
        """Text that this token completes, possibly none."""
        self._ids.append(token)
        text = self._decode(self._window, None)
        if text.endswith("\ufffd"):
            return ""
        piece = text[len(self._decode(self._window, self._read)) :]
        self._window, self._read = self._read, len(self._ids)
        return piece

    def flush(self) -> str:
        """What is held back, replacement characters included."""
        piece = self._decode(self._window, None)[len(self._decode(self._window, self._read)) :]
        self._window, self._read = self._read, len(self._ids)
        return piece

    def _decode(self, first: int, last: int | None) -> str:
        return str(
            self._tokenizer.decode(self._ids[first:last], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class StopStrings:
    """Cuts text at the first stop string, also where it spans pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Text that certainly precedes any stop string. Nothing more comes once `hit` is set."""
        if not self._stop:
            return piece
        self._held += piece
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            self.hit = True
            safe, self._held = self._held[: min(found)], ""
            return safe
        keep = max(self._overlap(s) for s in self._stop)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)
