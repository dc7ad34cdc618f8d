"""What requests may ask for, field by field; what is unknown or cannot be done is refused by name."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvquilt.errors import nearest
from kvquilt.server.fields import Extension, Message, StreamOptions, broken

# what a client may send for accounting, routing or storage elsewhere; the answer does not depend on it
IGNORED = frozenset(
    (
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
        "safety_identifier", "service_tier", "store", "user", "verbosity",
    )
)  # fmt: skip
# what would change the answer and is not there, with the values that ask for nothing
ABSENT: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": ([],), "logit_bias": ({},), "logprobs": (False, 0), "modalities": (["text"],), "moderation": (),
    "n": (1,), "prediction": (), "presence_penalty": (0,), "response_format": ({"type": "text"},), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "web_search_options": (),
}  # fmt: skip


class Asked(BaseModel):
    """What both kinds of completion take. `model` None: the one that is served."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kvquilt: Extension = Extension()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or value is None:
                continue
            if name not in ABSENT:
                raise broken(name, f"unrecognized request argument{nearest(name, [*type(self).model_fields])}")
            if not any(value == neutral and type(value) is type(neutral) for neutral in _alike(ABSENT[name])):
                raise broken(name, "is not supported with this value")
        if self.stream_options is not None and not self.stream:
            raise broken("stream_options", "goes with stream=true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise broken("max_completion_tokens", "give one of 'max_tokens' and 'max_completion_tokens'")
        return self

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def options(self) -> dict[str, Any]:
        """For `Engine.stream`. Without a temperature OpenAI's default holds, 1."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = {"top_p": self.top_p, "top_k": self.top_k, "seed": self.seed}
        return {
            "method": self.kvquilt.method,
            "budget": self.kvquilt.budget,
            "max_new_tokens": self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "stop": stop,
            **{name: value for name, value in given.items() if value is not None},
        }


class ChatAsked(Asked):
    messages: list[Message] = Field(min_length=1)

    @model_validator(mode="after")
    def _in_messages(self) -> Self:
        if self.kvquilt.documents:
            raise broken("kvquilt.documents", "in a chat, documents are content parts of messages")
        return self


class TextAsked(Asked):
    prompt: str | list[str]

    @model_validator(mode="after")
    def _one(self) -> Self:
        if isinstance(self.prompt, list) and len(self.prompt) != 1:
            raise broken("prompt", "must be one text")
        return self

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


def _alike(neutral: tuple[Any, ...]) -> list[Any]:
    """A number as client libraries may write it."""
    return [*neutral, *(float(each) for each in neutral if type(each) is int)]


class TokenizeAsked(BaseModel):
    """A text, or messages in the model's chat template."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise broken("prompt", "give one of 'prompt' and 'messages'")
        return self
