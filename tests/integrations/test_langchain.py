"""LangChain against a real server: our chat model, and its own client of OpenAI as it comes."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

pytest.importorskip("langchain_openai", reason="pip install 'kvquilt[langchain]'")

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever
from langchain_openai import ChatOpenAI

from kvquilt.integrations.langchain import ChatKvquilt, message
from tests.engines import documents
from tests.server.running import MODEL, Served

QUESTION = "What does the statement do?"
NONE = {"kvquilt": {"method": "none"}}


class Retriever(BaseRetriever):
    """Finds the same three, the first without an id and once more at the end."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        found = [Document(page_content=each.text, id=each.id) for each in documents(3)]
        found[0].id = None
        return [*found, found[0]]


def model(served: Served, kind: type[ChatOpenAI] = ChatKvquilt, **options: Any) -> ChatOpenAI:
    served_at = {"base_url": f"{served.url}/v1", "api_key": "unused", "max_retries": 0}
    return kind(model=MODEL, temperature=0, max_tokens=6, **served_at, **options)


def test_a_chain_from_retriever_to_answer_brings_the_account(served: Served) -> None:
    chat = model(served, extra_body=NONE)
    chain = Retriever() | (lambda found: [message(QUESTION, found)]) | chat
    answer = chain.invoke(QUESTION)
    account = answer.response_metadata["kvquilt"]
    ids = [each["id"] for each in account["documents"]]
    assert ids[0].startswith("doc-")
    assert ids[1:] == [each.id for each in documents(3)[1:]]
    assert account["method"] == "none"
    assert answer.usage_metadata["output_tokens"] == 6
    assert answer.usage_metadata["input_token_details"]["cache_read"] == account["tokens"]["reused"] > 0
    streamed = None
    for chunk in chain.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.content == answer.content
    assert [each["id"] for each in streamed.response_metadata["kvquilt"]["documents"]] == ids
    assert streamed.response_metadata["finish_reason"] == "length"
    assert streamed.usage_metadata["output_tokens"] == 6


def test_it_answers_asynchronously(served: Served) -> None:
    async def both() -> list[Any]:
        chat = model(served, extra_body=NONE)
        asked = [message(QUESTION, Retriever().invoke(QUESTION))]
        whole = await chat.ainvoke(asked)
        pieces = [chunk async for chunk in chat.astream(asked)]
        await chat.root_async_client.close()
        return [whole, *pieces]

    whole, *pieces = asyncio.run(both())
    assert "".join(each.content for each in pieces) == whole.content
    told = [each.response_metadata["kvquilt"] for each in pieces if "kvquilt" in each.response_metadata]
    assert [each["tokens"] for each in told] == [whole.response_metadata["kvquilt"]["tokens"]]


def test_scores_reach_the_methods_that_rank(served: Served) -> None:
    texts = documents(3)
    for best in range(3):
        found = [(Document(page_content=each.text, id=each.id), float(n == best)) for n, each in enumerate(texts)]
        asked = [message(QUESTION, found)]
        answer = model(served, extra_body={"kvquilt": {"method": "retrieved-document"}}).invoke(asked)
        assert answer.response_metadata["kvquilt"]["documents"][-1]["id"] == texts[best].id
    reranked = Document(page_content="Rye.", id="rye", metadata={"relevance_score": 0.75})
    assert message("?", [reranked]).content[0]["score"] == 0.75


def test_a_key_and_the_servers_errors_pass_through(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        model(served).invoke(QUESTION, model="another")
    with pytest.raises(openai.BadRequestError, match="unknown method"):
        model(served, extra_body={"kvquilt": {"method": "nonsense"}}).invoke(QUESTION)


def test_blank_documents_are_left_out(served: Served) -> None:
    blank = [Document(page_content=text, id="blank") for text in ("", " \n")]
    chat, rye = model(served, extra_body=NONE), Document(page_content="Rye needs two days.", id="rye")
    for found, ids in (([blank[0], rye, blank[1]], ["rye"]), (blank, [])):
        answer = chat.invoke([message(QUESTION, found)])
        assert [each["id"] for each in answer.response_metadata["kvquilt"]["documents"]] == ids


def test_by_default_it_asks_this_machine_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "somebody's")
    monkeypatch.setenv("OPENAI_API_BASE", "https://example.invalid/v1")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://example.invalid/v1")
    chat = ChatKvquilt(model=MODEL)
    assert str(chat.root_client.base_url) == "http://127.0.0.1:8000/v1/"
    assert chat.root_client.api_key == "unused"


def test_langchains_own_client_works_as_it_comes(served: Served) -> None:
    chat = model(served, ChatOpenAI, stream_usage=True)
    history = [SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Hello!"), HumanMessage(QUESTION)]
    answer = chat.invoke(history)
    assert answer.usage_metadata["output_tokens"] == 6
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == MODEL
    pieces = list(chat.stream(history))
    assert "".join(each.content for each in pieces) == answer.content
    (usage,) = [each.usage_metadata for each in pieces if each.usage_metadata]
    assert usage["output_tokens"] == 6
    assert [each.content for each in chat.batch([history, history])] == [answer.content] * 2
    parts = [{"type": "document", "text": "Rye needs two days."}, {"type": "text", "text": QUESTION}]
    assert chat.invoke([HumanMessage(content=parts)], extra_body=NONE).usage_metadata["input_token_details"][
        "cache_read"
    ]
