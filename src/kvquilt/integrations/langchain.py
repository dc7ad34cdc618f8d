"""LangChain: retrieved documents to a message, and a chat model whose answers bring the account along."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from pydantic import Field, SecretStr

from kvquilt.integrations.extra import needs
from kvquilt.integrations.parts import KEY, URL, Found, content, document_parts

with needs("langchain"):
    import openai
    from langchain_core.documents import Document
    from langchain_core.messages import HumanMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_openai import ChatOpenAI

Key = SecretStr | None | Callable[[], str] | Callable[[], Awaitable[str]]  # as `ChatOpenAI` declares it
SCORE = "relevance_score"  # where LangChain's rerankers leave theirs


def message(question: str, documents: Iterable[Document | tuple[Document, float]]) -> HumanMessage:
    """A user's message with these documents and then the question.

    Args:
        documents: as a retriever returns them, or with scores as ``similarity_search_with_relevance_scores`` does.
            Larger is better: distances are no scores.

    Raises:
        InputError: a text that is none.
    """
    return HumanMessage(content=[*content(document_parts(map(_found, documents)), question)])


class ChatKvquilt(ChatOpenAI):
    """`ChatOpenAI` at a kvquilt server, by default one on this machine. Messages' ``response_metadata["kvquilt"]`` is
    the account, and ``usage_metadata`` the usage, streamed or not. The request's field goes through ``extra_body``."""

    openai_api_base: str | None = Field(default=URL, alias="base_url")
    openai_api_key: Key = Field(default=SecretStr(KEY), alias="api_key")
    stream_usage: bool | None = True

    @property
    def _llm_type(self) -> str:
        return "kvquilt"

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        told = response if isinstance(response, dict) else response.model_dump(include={"kvquilt"})
        result.generations[0].message.response_metadata["kvquilt"] = told["kvquilt"]
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if made is not None and "kvquilt" in chunk:
            made.message.response_metadata["kvquilt"] = chunk["kvquilt"]
        return made


def _found(each: Document | tuple[Document, float]) -> Found:
    document, score = each if isinstance(each, tuple) else (each, each.metadata.get(SCORE))
    return document.id, document.page_content, score
