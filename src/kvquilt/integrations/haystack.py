"""Haystack: a chat generator that takes retrieved documents beside the messages."""

from __future__ import annotations

from typing import Any

from kvquilt.errors import InputError
from kvquilt.integrations.extra import needs
from kvquilt.integrations.parts import KEY, URL, content, document_parts, noted, pieces

with needs("haystack"):
    import openai
    from haystack import Document, component
    from haystack.dataclasses import ChatMessage, StreamingChunk
    from haystack.dataclasses.streaming_chunk import SyncStreamingCallbackT
    from haystack.utils import Secret


@component
class KvquiltChatGenerator:
    """Answers at a kvquilt server, by default one on this machine. Replies' ``meta`` has the usage and the account.

    Args:
        model: as the server calls it.
        api_key: for a server that has keys.
        generation_kwargs: fields of a request, such as ``temperature``, ``max_tokens``, or, in ``extra_body``,
            ``kvquilt``.
        timeout: seconds.
    """

    def __init__(
        self,
        model: str,
        api_base_url: str = URL,
        api_key: Secret | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.model, self.api_base_url, self.api_key = model, api_base_url, api_key
        self.generation_kwargs, self.timeout = generation_kwargs or {}, timeout
        self._client: openai.OpenAI | None = None

    def warm_up(self) -> None:
        if self._client is None:
            key = KEY if self.api_key is None else self.api_key.resolve_value()
            self._client = openai.OpenAI(base_url=self.api_base_url, api_key=key, timeout=self.timeout)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage] | str,
        documents: list[Document] | None = None,
        streaming_callback: SyncStreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """One reply; the documents stand ahead of the text of the last message, which is a user's."""
        self.warm_up()
        assert self._client is not None
        several = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
        sent = [each.to_openai_dict_format() for each in several]
        if documents:
            if not several or several[-1].text is None or not several[-1].is_from("user"):
                raise InputError("messages", "must end with a user's text, which the documents stand before")
            found = ((each.id, each.content, each.score) for each in documents)
            sent[-1]["content"] = content(document_parts(found), several[-1].text)
        asked: dict[str, Any] = {"model": self.model, "messages": sent}
        asked |= self.generation_kwargs | (generation_kwargs or {})
        if streaming_callback is None:
            answer = self._client.chat.completions.create(**asked)
            text, meta = answer.choices[0].message.content, noted(answer)
        else:
            text, meta = "", {}
            for piece, told in pieces(self._client, **asked):
                text, meta = text + piece, meta | told
                streaming_callback(StreamingChunk(piece, told, finish_reason=told.get("finish_reason")))
        return {"replies": [ChatMessage.from_assistant(text, meta={"model": self.model, "index": 0, **meta})]}
