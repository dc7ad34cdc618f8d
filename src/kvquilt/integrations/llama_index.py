"""LlamaIndex: retrieved nodes to a message, and a model that sends them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pydantic import Field

from kvquilt.errors import InputError
from kvquilt.integrations.extra import needs
from kvquilt.integrations.parts import KEY, URL, content, document_parts, pieces

with needs("llama-index"):
    import openai
    from llama_index.core import llms
    from llama_index.core.base.llms import generic_utils
    from llama_index.core.llms import ChatMessage, ChatResponse, ChatResponseGen
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.schema import MetadataMode, NodeWithScore

PARTS = "documents"  # under which a message carries them


def message(question: str, nodes: Sequence[NodeWithScore]) -> ChatMessage:
    """A user's message with these nodes, as a model reads them, and then the question."""
    found = ((each.node.node_id, each.node.get_content(MetadataMode.LLM), each.score) for each in nodes)
    return ChatMessage(content=question, additional_kwargs={PARTS: document_parts(found)})


class Kvquilt(llms.CustomLLM):
    """Answers at a kvquilt server, by default one on this machine. Responses' ``additional_kwargs`` have the usage and
    the account, streamed ones' the last. `options`: more fields of a request, such as ``seed`` or ``extra_body``."""

    model: str
    base_url: str = URL
    api_key: str = Field(default=KEY, exclude=True, repr=False)
    context_window: int = 8192
    max_tokens: int = 128
    temperature: float = 0.0
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def metadata(self) -> llms.LLMMetadata:
        length, new = self.context_window, self.max_tokens
        return llms.LLMMetadata(context_window=length, num_output=new, is_chat_model=True, model_name=self.model)

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=self.api_key)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return list(self._answer(messages, **kwargs))[-1]

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._answer(messages, **kwargs)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> llms.CompletionResponse:
        return generic_utils.chat_response_to_completion_response(self.chat([ChatMessage(prompt)], **kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> llms.CompletionResponseGen:
        found = self.stream_chat([ChatMessage(prompt)], **kwargs)
        return generic_utils.stream_chat_response_to_completion_response(found)

    def _answer(self, messages: Sequence[ChatMessage], **more: Any) -> ChatResponseGen:
        asked = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens, **self.options}
        text, told = "", dict[str, Any]()
        for piece, noted in pieces(self.client, messages=[_sent(each) for each in messages], **(asked | more)):
            text, told = text + piece, told | noted
            yield ChatResponse(message=ChatMessage(text, role="assistant"), delta=piece, additional_kwargs=told)


def _sent(each: ChatMessage) -> dict[str, Any]:
    if not all(isinstance(block, llms.TextBlock) for block in each.blocks):
        raise InputError("messages", "only texts can be sent")
    text, parts = each.content or "", each.additional_kwargs.get(PARTS)
    return {"role": each.role.value, "content": content(parts, text) if parts else text}
