"""Every exception that kvquilt raises on purpose.

    KvquiltError
    ├── InputError (ValueError)      something the caller passed; names field, input and rule
    │   ├── PromptError              a prompt that cannot be rendered or tokenised faithfully
    │   ├── ContextLengthError       prompt and answer exceed the model's context
    │   ├── LeakageError             what evaluates would also tune or train; names what is shared
    │   └── ConfigError              an unknown or invalid setting; carries the nearest valid name
    ├── ModelError
    │   ├── ModelNotFoundError       no such model here, or a folder that lacks a part
    │   ├── UnsupportedModelError    the model's caches cannot be reused; says why
    │   ├── WriterMismatchError      a trained writer that belongs to another model
    │   └── NumericsError            the model produced NaN or infinite logits
    ├── StoreError
    │   ├── StoreUnavailableError    the store directory cannot be read, written or understood
    │   └── IntegrityError           an invariant of a store or cache is broken: a bug or a damaged disk
    ├── WriterError                  a trained writer's folder is damaged, incomplete or not understood
    └── ConversationError            a follow-up on an answer whose live cache is gone

Catch ``KvquiltError`` to catch them all. A store that is merely damaged never raises while answering:
damage is a counted miss (see `kvquilt.store`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvquiltError(Exception):
    """Base of every deliberate failure."""


class InputError(KvquiltError, ValueError):
    """The caller passed something that breaks a rule.

    The message reads ``field: rule (got input)``. Document text never appears in it.
    """

    def __init__(self, field: str, rule: str, got: object = None) -> None:
        self.field, self.rule, self.got = field, rule, got
        super().__init__(f"{field}: {rule}" + ("" if got is None else f" (got {got!r})"))


class PromptError(InputError):
    """The prompt cannot be rendered or tokenised without altering the user's text."""


class ContextLengthError(InputError):
    """Prompt plus answer exceed the context; the message says by how many tokens and what to drop."""


class LeakageError(InputError):
    """Two sets that must be apart are not.

    Attributes:
        shared: what they have in common, by kind (``documents``, ``questions``, ``groups``), each by its id or name.
    """

    def __init__(self, field: str, rule: str, shared: dict[str, tuple[str, ...]]) -> None:
        self.shared = shared
        super().__init__(field, rule)


class ConfigError(InputError):
    """An unknown or invalid setting."""


class ModelError(KvquiltError):
    """Something is wrong with the model."""


class ModelNotFoundError(ModelError):
    """The model, or a part of it (its tokenizer, its weights), is not on this machine."""


class UnsupportedModelError(ModelError):
    """The model's KV cache cannot be placed at another position; the message gives the reason."""


class WriterMismatchError(ModelError):
    """A trained writer serves the one model it was trained for, whatever shapes would fit."""


class NumericsError(ModelError):
    """The model produced NaN or infinite logits, so there is no answer to give."""


class StoreError(KvquiltError):
    """Something is wrong with the store as a whole."""


class StoreUnavailableError(StoreError):
    """The store directory cannot be created, read or written, or is of another version."""


class IntegrityError(StoreError):
    """An invariant of a store or cache does not hold.

    Raised by `check_integrity()`, and where going on would break one: a slot cache that is written without a plan, or
    given back to a pool that has not lent it.
    """


class WriterError(KvquiltError):
    """The folder of a trained writer is damaged, incomplete, or of a kind or version that is not understood."""


class ConversationError(KvquiltError):
    """A follow-up was asked of an answer whose live cache was released or already continued."""


def nearest(name: object, valid: Iterable[str]) -> str:
    """A hint for an unknown name, of whatever type: ``; did you mean 'x'?`` or the list of valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(names)}"
