"""The stock client of OpenAI against a real server on a loopback socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.engines import documents
from tests.server.running import MODEL, Served, serving

QUESTION = "\nQuestion: What does the statement do?"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


@pytest.fixture(autouse=True)
def _at_rest(served: Served) -> Iterator[None]:
    yield
    served.rests()


def asked(count: int = 2) -> list[Any]:
    parts = [{"type": "document", "id": each.id, "text": each.text} for each in documents(count)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


def test_a_chat_answers_as_the_engine_does(served: Served) -> None:
    from kvquilt import Prompt

    messages = [{"role": "user", "content": [*documents(2), QUESTION]}]
    prompt = Prompt.chat(messages, served.engine.model.tokenizer)
    expected = served.engine.ask(prompt, method="none", max_new_tokens=8)
    answer = served.client().chat.completions.create(
        messages=asked(), extra_body={"kvquilt": {"method": "none"}}, **GREEDY
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)
    ledger = expected.ledger.tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == ledger["exact"] + ledger["reused"] > 0
    assert [each["provenance"] for each in answer.kvquilt["documents"]] == ["reused", "reused"]
    assert answer.kvquilt["method"] == "none"
    assert "explain" not in answer.kvquilt


def test_a_stream_has_the_pieces_of_the_whole_and_says_its_usage_last(served: Served) -> None:
    client = served.client()
    whole = client.chat.completions.create(messages=asked(), extra_body={"kvquilt": {"method": "none"}}, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=asked(), stream=True, stream_options={"include_usage": True},
            extra_body={"kvquilt": {"method": "none", "explain": True}}, **GREEDY,
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert "prompt tokens" in chunks[-2].kvquilt["explain"]


def test_without_usage_asked_for_no_chunk_has_any(served: Served) -> None:
    chunks = list(served.client().chat.completions.create(messages=asked(), stream=True, **GREEDY))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_completion_of_a_text_streamed_and_not(served: Served) -> None:
    client, docs = served.client(), [{"id": each.id, "text": each.text} for each in documents(1)]
    extra = {"kvquilt": {"method": "none", "documents": docs}}
    whole = client.completions.create(prompt="The with statement", extra_body=extra, **GREEDY)
    chunks = list(client.completions.create(prompt=["The with statement"], stream=True, extra_body=extra, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""
    assert whole.usage.prompt_tokens_details.cached_tokens > 0
    assert whole.kvquilt["documents"][0]["id"] == docs[0]["id"]


def test_the_seed_decides_and_stop_strings_end(served: Served) -> None:
    def ask(**more: Any) -> Any:
        options = {**GREEDY, "temperature": 1.5, **more}
        return served.client().chat.completions.create(messages=asked(1), **options).choices[0]

    first = ask(seed=3)
    assert ask(seed=3) == first
    assert ask(seed=4).message.content != first.message.content
    stopped = ask(seed=3, stop=first.message.content[2:4])
    assert (stopped.message.content, stopped.finish_reason) == (first.message.content[:2], "stop")


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"n": 2}, "n", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"extra_body": {"temperatur": 1}}, "temperatur", "did you mean 'temperature'"),
        ({"extra_body": {"kvquilt": {"methd": "none"}}}, "kvquilt.methd", "did you mean 'method'"),
        ({"extra_body": {"kvquilt": {"method": "nonsense"}}}, "method", "nonsense"),
        ({"extra_body": {"kvquilt": {"method": "auto", "budget": "5%"}}}, "budget", "name a method"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "one of 'max_tokens'"),
        ({"max_tokens": 5000}, "prompt", "exceed"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.content", "needed"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "type must be one of",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(served: Served, fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        served.client().chat.completions.create(**{"messages": asked(), **GREEDY, **fields})
    assert caught.value.param.startswith(param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    answer = served.client().chat.completions.create(
        messages=asked(1), n=1, tools=[], frequency_penalty=0.0, presence_penalty=0, logprobs=False, user="somebody",
        store=False, response_format={"type": "text"}, **GREEDY,
    )  # fmt: skip
    plain = served.client().chat.completions.create(messages=asked(1), **GREEDY)
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        served.client().chat.completions.create(messages=asked(1), **{**GREEDY, "model": "gpt-5"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_the_history_of_a_client_can_be_sent_back(served: Served) -> None:
    client = served.client()
    said = client.chat.completions.create(messages=asked(1), **GREEDY).choices[0].message
    history = [*asked(1), said, {"role": "user", "content": "And then?"}]
    assert client.chat.completions.create(messages=history, **GREEDY).usage.prompt_tokens > 0


def test_models_and_tokens(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_extra["max_model_len"] == 1024
    found = served.http().post("/tokenize", json={"prompt": "with"}).json()
    assert found["tokens"] == served.engine.model.tokenizer("with")["input_ids"]
    chat = served.http().post("/tokenize", json={"messages": asked(1)}).json()
    used = client.chat.completions.create(messages=asked(1), **GREEDY).usage
    assert chat["count"] == used.prompt_tokens


def test_behind_the_servers_own_system_message_the_first_document_is_exact(served: Served) -> None:
    from kvquilt.engine import SYSTEM

    answer = served.client().chat.completions.create(
        messages=[{"role": "system", "content": SYSTEM}, *asked(2)],
        extra_body={"kvquilt": {"method": "none"}},
        **GREEDY,
    )
    assert [each["provenance"] for each in answer.kvquilt["documents"]] == ["exact", "reused"]
    tokens = answer.kvquilt["tokens"]
    assert answer.usage.prompt_tokens_details.cached_tokens == tokens["exact"] + tokens["reused"]


def test_a_recomputed_token_is_not_cached(served: Served) -> None:
    answer = served.client().chat.completions.create(
        messages=asked(2), extra_body={"kvquilt": {"method": "epic:k=4"}}, **GREEDY
    )
    tokens = answer.kvquilt["tokens"]
    assert tokens["recomputed"] == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == tokens["reused"] > 0
    assert answer.kvquilt["charged_share"] > 0


@pytest.mark.parametrize("best", ["with", "break", "pass"])
def test_the_retrievers_scores_say_which_document_is_the_best(served: Served, best: str) -> None:
    (message,) = asked(3)
    for part in message["content"][:3]:
        part["score"] = 2 if part["id"] == best else 0.5
    extra = {"kvquilt": {"method": "retrieved-document"}}
    answer = served.client().chat.completions.create(messages=[message], extra_body=extra, **GREEDY)
    assert answer.kvquilt["documents"][-1]["id"] == best  # it stands next to the question


def test_a_score_is_a_finite_number(served: Served) -> None:
    part = '{"type": "document", "text": "Rye needs two days.", "score": 1e999}'
    body = f'{{"messages": [{{"role": "user", "content": [{part}]}}]}}'
    answer = served.http().post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert answer.json()["error"]["param"].endswith("score")
