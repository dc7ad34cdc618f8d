"""From messages to prompt parts, through the model's own chat template.

The template is rendered once, with a sentinel in place of every text a user wrote. What stands around the sentinels
is template text, whose control tokens count; what the sentinels stood for comes back untouched.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvquilt.document import Document, Inline, Part, check_text
from kvquilt.errors import InputError, PromptError
from kvquilt.tokens import Tokenizer

PINNED_DATE = datetime.date(2024, 7, 26)
"""The date that templates print unless told otherwise: what Llama 3 templates fall back to. Never today's."""

_ROLE = re.compile(r"[A-Za-z][A-Za-z_-]*")
_MONTHS = "January February March April May June July August September October November December".split()  # noqa: SIM905
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()  # noqa: SIM905

# A macro shadows the function of the same name that transformers gives to templates and that reads the clock; values
# passed to apply_chat_template cannot, since transformers turns functions among them into text. The line break
# behind the macro is swallowed with the block.
_PINNED_CLOCK = (
    "{% macro strftime_now(format) %}{% set ns = namespace(text=format) %}{% for directive, value in kvquilt_date %}"
    "{% set ns.text = ns.text | replace(directive, value) %}{% endfor %}{{ ns.text }}{% endmacro %}\n"
)


def chat_parts(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    date: datetime.date | None = None,
    add_generation_prompt: bool = True,
) -> list[Part]:
    """The conversation as parts; see `Prompt.chat`.

    An assistant message that is a plain string passes through the template as it is, because templates for thinking
    models look into earlier answers and drop the reasoning; special tokens it spells stay text all the same.
    """
    conversation = _check_messages(messages)
    marks = _Marks(conversation)
    specials = _special_pattern(tokenizer)
    rendered: list[dict[str, str]] = []
    for index, (role, content) in enumerate(conversation):
        if role == "assistant" and len(content) == 1 and isinstance(content[0], Inline):
            pieces = specials.split(content[0].text)
            marked = [marks.add(index, [Inline(text)], role) if n % 2 else text for n, text in enumerate(pieces)]
            rendered.append({"role": role, "content": "".join(marked)})
        elif any(isinstance(part, Document) or part.text for part in content):
            rendered.append({"role": role, "content": marks.add(index, content, role)})
        else:
            rendered.append({"role": role, "content": ""})  # templates ask whether there is content
    text = _render(tokenizer, rendered, date or PINNED_DATE, add_generation_prompt)
    return marks.replace(text)


def continuation_parts(
    tokenizer: Tokenizer, question: str | Document | Sequence[str | Document], *, date: datetime.date | None = None
) -> list[Part]:
    """Template text behind an answer, the question, template text before the next answer; see `continuation`."""
    turns: list[tuple[str, list[Part]]] = [
        ("user", [Inline("?")]),
        ("assistant", [Inline("!")]),
        ("user", _check_content("question", question)),
    ]
    marks = _Marks(turns)
    rendered = [{"role": role, "content": marks.add(n, parts, role)} for n, (role, parts) in enumerate(turns)]
    text = _render(tokenizer, rendered, date or PINNED_DATE, True)
    parts, messages = marks.split(text)
    if 1 not in messages:
        raise PromptError(
            "tokenizer.chat_template", "drops an earlier answer, so a conversation cannot continue behind it"
        )
    return parts[messages.index(1) + 1 :]


class _Held(NamedTuple):
    """What a sentinel stands for: `parts` of the message with this index; may the template drop it, or move it?"""

    message: int
    parts: list[Part]
    may_drop: bool
    may_move: bool


class _Marks:
    """Sentinels, each standing for one text of one message."""

    def __init__(self, conversation: list[tuple[str, list[Part]]]) -> None:
        texts = [part.text for _, content in conversation for part in content]
        nonce = 0
        while any(f"\ue000{nonce}." in text for text in texts):
            nonce += 1
        self._nonce = nonce
        self._held: list[_Held] = []

    def add(self, message: int, parts: list[Part], role: str) -> str:
        """The sentinel for `parts` of `messages[message]`.

        The template may drop an assistant's text (reasoning, earlier turns) and move a system message (Mistral's puts
        it before the last question); every other text must appear once and in order.
        """
        self._held.append(_Held(message, parts, may_drop=role == "assistant", may_move=role == "system"))
        return f"\ue000{self._nonce}.{len(self._held) - 1}\ue001"

    def replace(self, text: str) -> list[Part]:
        return self.split(text)[0]

    def split(self, text: str) -> tuple[list[Part], list[int | None]]:
        """The parts of the rendered text, and for each the index of its message, ``None`` for template text."""
        pieces = re.split(f"\ue000{self._nonce}\\.(\\d+)\ue001", text)
        order = [int(n) for n in pieces[1::2]]
        for n, held in enumerate(self._held):
            if (count := order.count(n)) != 1 and not (held.may_drop and count == 0):
                how = "drops or rewrites" if count == 0 else "repeats"
                raise PromptError(f"messages[{held.message}]", f"the model's chat template {how} this message's text")
        turns = [n for n in order if not self._held[n].may_move]
        for n, after in itertools.pairwise(turns):
            if n > after:
                raise PromptError(
                    f"messages[{self._held[n].message}]", "the model's chat template moves it out of order"
                )
        parts: list[Part] = []
        origins: list[int | None] = []
        for n, piece in enumerate(pieces):
            mark = self._held[int(piece)] if n % 2 else None
            new = _template(piece) if mark is None else mark.parts
            parts += new
            origins += [None if mark is None else mark.message] * len(new)
        return parts, origins


def _template(text: str) -> list[Part]:
    return [Inline(text, control=True)] if text else []


def _render(tokenizer: Tokenizer, messages: list[dict[str, str]], date: datetime.date, generation: bool) -> str:
    if not tokenizer.chat_template:
        rule = "the model has no chat template; use an instruct model, or Prompt.plain for a base model"
        raise PromptError("tokenizer.chat_template", rule)
    template = tokenizer.get_chat_template()
    values: dict[str, Any] = {"date_string": _strftime("%d %b %Y", date)}
    if "strftime_now" in template:
        template, values["kvquilt_date"] = _PINNED_CLOCK + template, _directives(date)
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=generation, **values
        )
    except Exception as error:  # a template is its author's program and may raise anything
        raise PromptError("messages", f"the model's chat template refuses them: {error}") from error
    return str(text)


def _check_messages(messages: object) -> list[tuple[str, list[Part]]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InputError("messages", "must be a list of messages", type(messages).__name__)
    if not messages:
        raise InputError("messages", "at least one is needed")
    checked = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            got = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
            raise InputError(name, "must have exactly the keys 'role' and 'content'", got)
        role = message["role"]
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InputError(f"{name}.role", "must be a word, such as 'user': it becomes template text", role)
        checked.append((role, _check_content(f"{name}.content", message["content"])))
    return checked


def _check_content(name: str, content: object) -> list[Part]:
    given = [content] if isinstance(content, str | Document) else content
    if not isinstance(given, list | tuple) or not all(isinstance(part, str | Document) for part in given):
        got = [type(part).__name__ for part in given] if isinstance(given, list | tuple) else type(given).__name__
        raise InputError(name, "must be a string, a Document or a list of them", got)
    for part in given:
        if isinstance(part, str):
            check_text(name, part)
    return [Inline(part) if isinstance(part, str) else part for part in given]


def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    special = [str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    longest_first = sorted(special, key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if special else "((?!))")


def _directives(date: datetime.date) -> list[tuple[str, str]]:
    """Every directive of ``strftime`` that a template uses, at midnight and in English whatever the locale."""
    day, month = _DAYS[date.weekday()], _MONTHS[date.month - 1]
    padded = {"d": date.day, "m": date.month, "H": 0, "I": 12, "M": 0, "S": 0}
    out = [(f"%-{letter}", str(value)) for letter, value in padded.items()]
    out += [(f"%{letter}", f"{value:02d}") for letter, value in padded.items()]
    names = {"B": month, "b": month[:3], "A": day, "a": day[:3], "p": "AM", "Z": "", "z": ""}
    numbers = {"Y": f"{date.year:04d}", "y": f"{date.year % 100:02d}", "j": f"{date.timetuple().tm_yday:03d}"}
    whole = {"F": date.isoformat(), "T": "00:00:00", "R": "00:00", "D": f"{date:%m/%d/%y}"}
    return out + [(f"%{letter}", text) for letter, text in {**names, **numbers, **whole}.items()] + [("%%", "%")]


def _strftime(form: str, date: datetime.date) -> str:
    for directive, value in _directives(date):
        form = form.replace(directive, value)
    return form
