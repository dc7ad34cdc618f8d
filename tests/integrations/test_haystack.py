"""Haystack against a real server: our chat generator in a pipeline, and its own as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytest.importorskip("haystack", reason="pip install 'kvquilt[haystack]'")

from haystack import Document, Pipeline
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

from kvquilt.errors import InputError
from kvquilt.integrations.haystack import KvquiltChatGenerator
from tests.engines import documents
from tests.server.running import MODEL, Served

QUESTION = "What does the statement do?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
NONE = {**GREEDY, "extra_body": {"kvquilt": {"method": "none"}}}


@pytest.fixture
def generator(served: Served) -> Iterator[KvquiltChatGenerator]:
    made = KvquiltChatGenerator(MODEL, f"{served.url}/v1", generation_kwargs=NONE)
    yield made
    made.close()


def test_a_pipeline_from_retriever_to_answer_brings_the_account(generator: KvquiltChatGenerator) -> None:
    store = InMemoryDocumentStore()
    store.write_documents([Document(content=each.text, id=each.id) for each in documents(3)])
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=2))
    pipeline.add_component("generator", generator)
    pipeline.connect("retriever.documents", "generator.documents")
    asked = [ChatMessage.from_system("Be brief."), ChatMessage.from_user(QUESTION)]
    found = pipeline.run(
        {"retriever": {"query": QUESTION}, "generator": {"messages": asked}}, include_outputs_from={"retriever"}
    )
    (reply,) = found["generator"]["replies"]
    ids = [each.id for each in found["retriever"]["documents"]]
    assert len(ids) == 2
    assert [each["id"] for each in reply.meta["kvquilt"]["documents"]] == ids
    assert (reply.meta["kvquilt"]["method"], reply.meta["finish_reason"]) == ("none", "length")
    cached = reply.meta["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == reply.meta["kvquilt"]["tokens"]["reused"] > 0

    pieces: list[StreamingChunk] = []
    streamed = pipeline.run(
        {"retriever": {"query": QUESTION}, "generator": {"messages": asked, "streaming_callback": pieces.append}}
    )["generator"]["replies"][0]
    assert "".join(each.content for each in pieces) == streamed.text == reply.text
    assert [each.finish_reason for each in pieces if each.finish_reason] == ["length"]
    assert streamed.meta["usage"] == reply.meta["usage"]
    assert streamed.meta["kvquilt"]["tokens"] == reply.meta["kvquilt"]["tokens"]


def test_scores_reach_the_methods_that_rank(generator: KvquiltChatGenerator) -> None:
    texts, ranked = documents(3), {"extra_body": {"kvquilt": {"method": "retrieved-document"}}}
    for best in range(3):
        found = [Document(content=each.text, id=each.id, score=float(n == best)) for n, each in enumerate(texts)]
        (reply,) = generator.run(QUESTION, found, generation_kwargs=ranked)["replies"]
        assert reply.meta["kvquilt"]["documents"][-1]["id"] == texts[best].id


def test_blank_documents_are_left_out(generator: KvquiltChatGenerator) -> None:
    blank, rye = [Document(content=text) for text in ("", " \n")], Document(content="Rye needs two days.", id="rye")
    for found, ids in (([blank[0], rye, blank[1]], ["rye"]), (blank, [])):
        (reply,) = generator.run(QUESTION, found)["replies"]
        assert [each["id"] for each in reply.meta["kvquilt"]["documents"]] == ids


def test_without_documents_it_is_a_chat_generator_like_any_other(generator: KvquiltChatGenerator) -> None:
    (reply,) = generator.run([ChatMessage.from_user(QUESTION)])["replies"]
    assert reply.meta["usage"]["completion_tokens"] == 6
    assert reply.is_from("assistant")


def test_what_cannot_be_sent_is_refused(generator: KvquiltChatGenerator) -> None:
    rye = Document(content="Rye needs two days.")
    for messages in ([], [ChatMessage.from_user(QUESTION), ChatMessage.from_assistant("Hm.")]):
        with pytest.raises(InputError, match="must end with a user's"):
            generator.run(messages, [rye])
    with pytest.raises(InputError, match="must have a text"):
        generator.run(QUESTION, [Document(content=None, meta={"file": "a.png"})])
    with pytest.raises(openai.BadRequestError, match="unrecognized"):
        generator.run(QUESTION, [rye], generation_kwargs={"extra_body": {"nonsense": 1}})


def test_a_pipeline_with_it_is_written_and_read_and_names_its_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "kvq-secret")
    pipeline = Pipeline()
    pipeline.add_component("generator", KvquiltChatGenerator(MODEL, api_key=Secret.from_env_var("SOME_KEY")))
    written = pipeline.dumps()
    assert "kvq-secret" not in written
    read = Pipeline.loads(written, allowed_modules=[KvquiltChatGenerator.__module__]).get_component("generator")
    assert (read.model, read.api_key.resolve_value()) == (MODEL, "kvq-secret")


def test_haystacks_own_generator_works_as_it_comes(served: Served) -> None:
    own = OpenAIChatGenerator(
        Secret.from_token("unused"), MODEL, api_base_url=f"{served.url}/v1", generation_kwargs=GREEDY, max_retries=0
    )
    pieces: list[StreamingChunk] = []
    (reply,) = own.run([ChatMessage.from_user(QUESTION)])["replies"]
    (streamed,) = own.run([ChatMessage.from_user(QUESTION)], pieces.append)["replies"]
    own.close()
    assert reply.text == streamed.text == "".join(each.content for each in pieces)
    assert reply.meta["usage"]["completion_tokens"] == 6
