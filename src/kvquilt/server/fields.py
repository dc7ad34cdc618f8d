"""What stands in requests: messages, parts of them, documents, and the field ``kvquilt``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvquilt.errors import nearest

PUBLIC_IDS = "public/"  # what ids of public documents begin with, and no others


def broken(param: str, rule: str) -> PydanticCustomError:
    """A rule over several fields; `param` is the one to name."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "param": param})


def check_own(id: str | None, param: str) -> None:
    """Raise where the id of one's own document looks like a public one's, or like a step in a path."""
    if id in (".", ".."):
        raise broken(param, "browsers and proxies take this id out of a URL; choose another")
    if id is not None and id.startswith(PUBLIC_IDS):
        raise broken(param, f"ids that begin with {PUBLIC_IDS} name public documents; choose another")


class Strict(BaseModel):
    """No unknown fields, no types made of others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                hint = nearest(name, cls.model_fields)
                raise PydanticCustomError("unknown", "unrecognized field{hint}", {"unknown": name, "hint": hint})
        return data


class TextPart(Strict):
    type: Literal["text"]
    text: str


class DocumentPart(Strict):
    """A document in a message, or by `id` alone one that was uploaded.

    Attributes:
        score: the retriever's, larger is better; where one is given, documents without come last.
    """

    type: Literal["document"] = "document"
    id: str | None = Field(None, min_length=1, max_length=512)
    text: str | None = None
    title: str | None = None
    score: float | None = Field(None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.text is None and self.id is None:
            raise broken("document", "needs a text, or the id of one that was uploaded")
        if self.text is None and self.title is not None:
            raise broken("document.title", "goes with a text; an uploaded document has its own")
        if self.text is not None:
            check_own(self.id, "document.id")
        return self


class Message(BaseModel):
    """One message; what assistants' messages carry beside their text must be empty."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    role: str
    content: str | list[Annotated[TextPart | DocumentPart, Field(discriminator="type")]] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _plain(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise broken(f"messages.{name}", "is not supported")
        if self.content is None and self.role != "assistant":
            raise broken("messages.content", "is needed")
        return self


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Extension(Strict):
    """The field ``kvquilt``.

    Attributes:
        method, budget: see `Engine.ask`.
        explain: the ledger also as a table.
        wait: for documents that are named and not compiled yet; else the answer is 409.
        documents: ahead of the text, for completions, whose prompt has no parts.
        deadline: seconds, if fewer than the server's.
    """

    method: str | None = None
    budget: str | float | int | None = None
    explain: bool = False
    wait: bool = True
    documents: list[DocumentPart] = []
    deadline: Annotated[float, Field(gt=0)] | None = None


class UploadedPart(Strict):
    """A document to keep; by default its id is made of its text."""

    id: str | None = Field(None, min_length=1, max_length=512)
    text: str
    title: str | None = None

    @model_validator(mode="after")
    def _own(self) -> Self:
        check_own(self.id, "id")
        return self


class UploadedParts(Strict):
    documents: list[UploadedPart] = Field(min_length=1)
