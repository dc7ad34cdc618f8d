"""LlamaIndex against a real server: our model, and its own client of OpenAI in an environment that it fits in."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core", reason="pip install 'kvquilt[llama-index]'")

from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from kvquilt.errors import InputError
from kvquilt.integrations.llama_index import Kvquilt, message
from tests.engines import documents
from tests.server.running import MODEL, Served

QUESTION = "What does the statement do?"
CLIENTS = Path(sys.prefix) / "llama-index-openai"  # `make env` puts them there


class Retriever(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=each.text, id_=each.id), score=0.5) for each in documents(2)]


@pytest.fixture
def llm(served: Served) -> Any:
    options = {"extra_body": {"kvquilt": {"method": "none"}}}
    made = Kvquilt(model=MODEL, base_url=f"{served.url}/v1", max_tokens=6, options=options)
    yield made
    made.client.close()


def test_a_query_engine_from_retriever_to_answer_brings_the_account(llm: Kvquilt) -> None:
    told: list[Any] = []

    class Engine(CustomQueryEngine):
        retriever: Retriever

        def custom_query(self, query_str: str) -> str:
            found = llm.chat([message(query_str, self.retriever.retrieve(query_str))])
            told.append(found.additional_kwargs)
            return found.message.content or ""

    answer = Engine(retriever=Retriever()).query(QUESTION)
    (noted,) = told
    assert [each["id"] for each in noted["kvquilt"]["documents"]] == [each.id for each in documents(2)]
    assert (noted["kvquilt"]["method"], noted["finish_reason"]) == ("none", "length")
    assert noted["usage"]["prompt_tokens_details"]["cached_tokens"] == noted["kvquilt"]["tokens"]["reused"] > 0
    assert noted["usage"]["completion_tokens"] == 6
    streamed = list(llm.stream_chat([message(QUESTION, Retriever().retrieve(QUESTION))]))
    assert "".join(each.delta for each in streamed) == streamed[-1].message.content == str(answer)
    assert streamed[-1].additional_kwargs["kvquilt"]["tokens"] == noted["kvquilt"]["tokens"]
    assert "kvquilt" not in streamed[0].additional_kwargs


def test_a_node_is_the_text_that_a_model_reads_by_its_id_and_never_its_hash() -> None:
    node = TextNode(text="Rye needs two days.", id_="rye", metadata={"file": "bread.md", "secret": "path"})
    node.excluded_llm_metadata_keys = ["secret"]
    (part,) = message("?", [NodeWithScore(node=node)]).additional_kwargs["documents"]
    assert part == {"type": "document", "id": "rye", "text": "file: bread.md\n\nRye needs two days."}


def test_blank_nodes_are_left_out(llm: Kvquilt) -> None:
    blank = [NodeWithScore(node=TextNode(text=text)) for text in ("", " \n")]
    rye = NodeWithScore(node=TextNode(text="Rye needs two days.", id_="rye"))
    for nodes, ids in (([blank[0], rye, blank[1]], ["rye"]), (blank, [])):
        answer = llm.chat([message("How long?", nodes)])
        assert [each["id"] for each in answer.additional_kwargs["kvquilt"]["documents"]] == ids


def test_texts_and_conversations_are_answered_in_every_way(llm: Kvquilt) -> None:
    whole = llm.complete("Rye needs")
    assert whole.additional_kwargs["usage"]["completion_tokens"] == 6
    assert [each.text for each in llm.stream_complete("Rye needs")][-1] == whole.text
    assert asyncio.run(llm.acomplete("Rye needs")).text == whole.text
    history = [ChatMessage("Hello."), ChatMessage("Hello!", role="assistant"), ChatMessage("Rye needs")]
    assert asyncio.run(llm.achat(history)).message.content == llm.chat(history, temperature=0).message.content
    assert llm.metadata.is_chat_model


def test_pictures_are_refused_and_not_left_out(llm: Kvquilt) -> None:
    picture = ImageBlock(url="http://example.invalid/a.png")
    with pytest.raises(InputError, match="only texts"):
        llm.chat([ChatMessage(blocks=[TextBlock(text="What is it?"), picture])])


OWN = """
import json, sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

options = {"temperature": 0, "max_tokens": 6, "is_chat_model": True, "max_retries": 0}
llm = OpenAILike(model=sys.argv[2], api_base=sys.argv[1], api_key="unused", **options)
asked = [ChatMessage("Be brief.", role="system"), ChatMessage("What does the statement do?")]
whole = llm.chat(asked)
pieces = list(llm.stream_chat(asked, stream_options={"include_usage": True}))
print(json.dumps({
    "whole": whole.message.content, "tokens": whole.raw.usage.completion_tokens,
    "streamed": "".join(each.delta or "" for each in pieces),
    "streamed_tokens": [each.raw.usage.completion_tokens for each in pieces if each.raw.usage],
    "text": llm.complete("Rye needs").text,
}))
"""


def test_llama_indexs_own_client_works_as_it_comes(served: Served, tmp_path: Path) -> None:
    """In a process of its own: it asks for another generation of OpenAI's client than the tests have."""
    if not CLIENTS.is_dir():
        pytest.skip("LlamaIndex's clients of OpenAI are not there: make env")
    script = tmp_path / "own.py"
    script.write_text(OWN)
    command = [sys.executable, str(script), f"{served.url}/v1", MODEL]
    environment = {**os.environ, "PYTHONPATH": str(CLIENTS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] == found["streamed"]
    assert found["whole"]
    assert found["text"]
    assert found["streamed_tokens"] == [found["tokens"]]
    assert 0 < found["tokens"] <= 6
