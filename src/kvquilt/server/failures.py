"""What a client is told when something is refused or fails: OpenAI's error objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvquilt.errors import ContextLengthError, InputError, KvquiltError, StoreError

# seconds to the next try: streams end and documents are compiled in this order of time; other hindrances last longer
RETRY, LATER = 2, 5
INVALID, SERVER = "invalid_request_error", "server_error"


class RefusalError(Exception):
    """A request that ends with this status.

    Attributes:
        code: a word that programs can compare.
        param: the field at fault, if it is one.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after = param, retry_after
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        kind = INVALID if self.status < 500 else SERVER
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        later = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return {**later, "www-authenticate": "Bearer"} if self.status == 401 else later


def refusal(error: BaseException) -> RefusalError:
    """What to tell a client of `error`; of one that nobody raised on purpose nothing but that it happened."""
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, ContextLengthError):
        return RefusalError(400, "context_length_exceeded", str(error), error.field)
    if isinstance(error, InputError):
        return RefusalError(400, "invalid_value", str(error), error.field)
    if isinstance(error, StoreError):
        rule = "the store of compiled documents cannot be used"
        return RefusalError(503, "store_unavailable", rule, retry_after=LATER)
    if isinstance(error, KvquiltError):
        return RefusalError(500, type(error).__name__, str(error))
    return RefusalError(500, "internal_error", "an unexpected failure; the server's log names it by the request's id")


def stopping() -> RefusalError:
    return RefusalError(503, "stopping", "the server is about to stop", retry_after=LATER)
