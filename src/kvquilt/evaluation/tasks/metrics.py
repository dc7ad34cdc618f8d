"""Task scores of short answers. Each has its name in every table; they are never mixed.

`micro_f1_bag` is the score that the trained writers' papers publish (KV Packet, SemPIC). `squad_em` and `squad_f1` are
those of SQuAD and HotpotQA. `contains_em` and `exact_literal` grade right or wrong, `recall` the strings of needles.
Words are what white space separates.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvquilt.errors import InputError

_LIMIT = 32  # words in which a right answer must come
_LEAST_GAIN = 0.05  # between no repair and full prefill, below which a recovered share is noise
_MARKER = "answer:"
_LEADS = ("in", "at", "on", "for", "by", "from", "studied", "attended", "was", "were", "is", "are")
_CLOSED = frozenset({"yes", "no", "noanswer"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Counts:
    """Words of answers that are right (`tp`), that are not (`fp`), and that are missing (`fn`). Counts add up."""

    tp: int = 0
    fp: int = 0
    fn: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tp + other.tp, self.fp + other.fp, self.fn + other.fn)

    @property
    def f1(self) -> float:
        """2PR / (P + R); 0 where nothing is right."""
        return 2 * self.tp / (2 * self.tp + self.fp + self.fn) if self.tp else 0.0


def bare(text: str) -> str:
    """Lower case, no surrounding blanks, no full stops at the end."""
    return text.lower().strip().rstrip(".")


def bare_value(text: str) -> str:
    """`bare`, from behind what leads to a value: the Biography task's form of a prediction.

    "She was born in Amberford." leaves "amberford". Prepositions are tried before verbs, each as a word with others
    before and behind it; the first that occurs takes all before it away.
    """
    text = bare(text)
    for lead in _LEADS:
        _, found, rest = text.partition(f" {lead} ")
        if found:
            return rest.strip(" :.,")
    return text


def marked(text: str) -> str:
    """`bare`, from behind the last "answer:". Empty where the marker is missing, which `is_marked` counts apart."""
    return bare(text.lower().rpartition(_MARKER)[2]) if is_marked(text) else ""


def is_marked(text: str) -> bool:
    """Whether the prediction closes with an answer line, as the step-by-step form asks for."""
    return _MARKER in text.lower()


def bag_counts(prediction: str, answers: Sequence[str], form: Callable[[str], str] = bare) -> Counts:
    """Words shared with the accepted answer that gives the best F1, the earliest of equals.

    The published score has one answer per item: pass ``answers[:1]`` to follow it to the letter.

    Args:
        form: what is taken of the prediction: `bare`, `bare_value` (Biography) or `marked` (step by step).

    Raises:
        InputError: no answers.
    """
    _check_answers(answers)
    said = Counter(form(prediction).split())
    return max((_overlap(said, Counter(bare(answer).split())) for answer in answers), key=lambda counts: counts.f1)


def micro_f1_bag(counts: Iterable[Counts]) -> float:
    """F1 of the corpus: words are summed over its items first, so a long wrong answer costs everyone.

    Raises:
        InputError: no counts.
    """
    every = list(counts)
    if not every:
        raise InputError("counts", "at least one item is needed")
    return sum(every, Counts()).f1


def squad_em(prediction: str, answers: Sequence[str]) -> float:
    """1 where the prediction is an accepted answer, up to case, punctuation, articles and blanks; else 0."""
    _check_answers(answers)
    said = _plain(prediction)
    return float(any(said == _plain(answer) for answer in answers))


def squad_f1(prediction: str, answers: Sequence[str], *, closed: bool = False) -> float:
    """F1 of the words shared with the accepted answer that gives the best one, forms as in `squad_em`.

    Args:
        closed: HotpotQA's rule: where prediction or answer is yes or no and the other is not the same, the score is 0.
    """
    _check_answers(answers)
    return max(_squad_f1(_plain(prediction), _plain(answer), closed) for answer in answers)


def contains_em(prediction: str, answers: Sequence[str]) -> float:
    """1 where an accepted answer stands in the first line, as whole words in a row within the first 32; else 0.

    Forms as in `squad_em`. Without those limits a model that restates its context would be right.
    """
    _check_answers(answers)
    said = _plain(_first_line(prediction)).split()[:_LIMIT]
    return float(any(_is_run(_plain(answer).split(), said) for answer in answers))


def exact_literal(prediction: str, answers: Sequence[str]) -> float:
    """1 where the first line is an accepted answer to the letter, else 0.

    Blanks around it, a full stop behind it and backticks around it are taken away first. Case and quotes count: what is
    accepted without its quotes is an answer of its own.
    """
    _check_answers(answers)
    said = _first_line(prediction).strip()
    forms = {said, said.removesuffix(".")}
    forms |= {form.strip("`") for form in forms if form.startswith("`") and form.endswith("`")}
    return float(not forms.isdisjoint(answers))


def recall(prediction: str, answers: Sequence[str]) -> float:
    """The share of the wanted strings that the prediction has, as whole words in any case.

    An answer is its wanted strings, joined by a comma and a blank; of several answers the best counts. Nothing is taken
    off for what is said beside them, so the answer's limit in tokens is part of the score.
    """
    _check_answers(answers)
    said = re.findall(r"\w+", prediction.lower())
    shares = []
    for answer in answers:
        wanted = [re.findall(r"\w+", part.lower()) for part in answer.split(", ")]
        shares.append(sum(_is_run(part, said) for part in wanted) / len(wanted))
    return max(shares)


def f1_recovery(arm: float, none: float, full: float) -> float | None:
    """The share of what reuse lost that the arm gives back: 0 is pure reuse, 1 is full prefill.

    ``None`` where full prefill is less than 0.05 above pure reuse: there is too little to recover.
    """
    return (arm - none) / (full - none) if full - none >= _LEAST_GAIN else None


def _squad_f1(said: str, wanted: str, closed: bool) -> float:
    if closed and said != wanted and (said in _CLOSED or wanted in _CLOSED):
        return 0.0
    if not said or not wanted:
        return float(said == wanted)
    return _overlap(Counter(said.split()), Counter(wanted.split())).f1


def _first_line(prediction: str) -> str:
    return (prediction.strip().splitlines() or [""])[0]


def _is_run(wanted: list[str], said: list[str]) -> bool:
    """Whether the words stand in a row. No words stand nowhere."""
    return bool(wanted) and any(said[i : i + len(wanted)] == wanted for i in range(len(said)))


def _overlap(said: Counter[str], wanted: Counter[str]) -> Counts:
    shared = (said & wanted).total()
    return Counts(shared, said.total() - shared, wanted.total() - shared)


def _plain(text: str) -> str:
    """Lower case, without punctuation and articles, single blanks."""
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def _check_answers(answers: Sequence[str]) -> None:
    if isinstance(answers, str) or not answers:
        raise InputError("answers", "must be a list of at least one accepted answer", type(answers).__name__)
