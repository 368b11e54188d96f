"""Scores and rankings of texts by the cosine of their embeddings."""

import math

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from jaxserve.core.errors import EngineFailed
from jaxserve.core.request import RequestOutput
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.server.answers.embedding import similarities
from jaxserve.server.app import create_app
from jaxserve.server.schemas.unsupported import UNSUPPORTED_IN_DOCUMENTS, UNSUPPORTED_IN_SCORING
from jaxserve.server.settings import ServerSettings
from tests.server.fake import END, FakeClient, byte_tokenizer
from tests.server.serving import serving

SCORE, RERANK = "/v1/score", "/v1/rerank"
PAIR = {"text_1": "aaa", "text_2": "b"}
QUERY = {"query": "aaa", "documents": ["aaaab", "aaa", "aab", "b"]}


class CountingClient(FakeClient):
    """A client that embeds a text as its numbers of the letters a to d, scaled to length 1."""

    async def embed(self, prompt, **request):
        self.seen.append(prompt)
        output = await super().embed(prompt, **request)
        text = self.tokenizer.decode(output.prompt_token_ids)
        counts = np.array([text.count(letter) for letter in "abcd"], np.float32)
        counts /= np.linalg.norm(counts)
        return RequestOutput(output.request_id, None, output.prompt_token_ids, (), True, embedding=counts)


def test_score_of_equal_embeddings_is_1_although_they_are_rounded():
    values = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    outputs = [RequestOutput("a", None, (5,), (), True, embedding=each) for each in values]
    assert similarities(outputs, outputs) == pytest.approx([1] * 50, abs=1e-12)


@pytest.fixture(scope="module")
def http():
    with (
        serving(CountingClient(max_model_len=64), ServerSettings(max_prompts=20)) as address,
        httpx.Client(base_url=address.url, timeout=30) as client,
    ):
        yield client


def answer(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()


def scores(http: httpx.Client, **body) -> list[float]:
    return [entry["score"] for entry in answer(http.post(SCORE, json=body))["data"]]


def refusal(response: httpx.Response) -> dict:
    assert response.status_code == 400, response.text
    return response.json()["error"]


def cosine(a: int, b: int) -> float:
    """Return the cosine of the texts "aaa" and one of `a` times "a" and `b` times "b"."""
    return pytest.approx(a / math.hypot(a, b))


def cosine_of(a: int, b: int) -> float:
    return a / math.hypot(a, b)


def test_score_of_a_text_with_itself_is_one(http):
    assert scores(http, text_1="aab", text_2="aab") == [pytest.approx(1)]


def test_one_text_is_compared_with_each_of_several(http):
    assert scores(http, text_1="aaa", text_2=["aab", "b", "a"]) == [cosine(2, 1), cosine(0, 1), cosine(1, 0)]


def test_lists_of_equal_length_are_compared_entry_by_entry(http):
    assert scores(http, text_1=["aaa", "b"], text_2=["aab", "b"]) == [cosine(2, 1), pytest.approx(1)]


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_both_sides_may_have_vllms_other_names(http, names):
    assert scores(http, **dict(zip(names, ("aaa", ["ab", "b"]), strict=True))) == [cosine(1, 1), cosine(0, 1)]


def test_texts_may_be_token_ids(http):
    ids = http.post("/tokenize", json={"prompt": "aab"}).json()["tokens"]
    assert scores(http, text_1="aaa", text_2=ids) == [cosine(2, 1)]


def test_score_answer_has_vllms_form(http):
    found = answer(http.post(SCORE, json=PAIR | {"model": "fake"}))
    assert found["id"].startswith("score-")
    assert (found["object"], found["model"]) == ("list", "fake")
    assert found["data"] == [{"index": 0, "object": "score", "score": 0.0}]
    assert found["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert http.post("/score", json=PAIR).json()["data"] == found["data"]


def test_ranking_begins_with_the_most_similar_document(http):
    found = answer(http.post(RERANK, json=QUERY | {"model": "fake"}))
    assert found["id"].startswith("rerank-")
    assert [(entry["index"], entry["relevance_score"]) for entry in found["results"]] == [
        (1, pytest.approx(1)),
        (0, cosine(4, 1)),
        (2, cosine(2, 1)),
        (3, cosine(0, 1)),
    ]
    assert found["results"][1]["document"] == {"text": "aaaab"}
    assert found["usage"] == {"prompt_tokens": 15, "total_tokens": 15}


def test_equally_similar_documents_stay_in_their_order(http):
    found = answer(http.post(RERANK, json={"query": "a", "documents": ["b", "a", "c", "a", "d"]}))
    assert [entry["index"] for entry in found["results"]] == [1, 3, 0, 2, 4]


@pytest.mark.parametrize(("top_n", "number"), [(1, 1), (3, 3), (9, 4), (0, 4), (None, 4)])
def test_ranking_has_the_best_top_n_documents(http, top_n, number):
    found = answer(http.post(RERANK, json=QUERY | {"top_n": top_n}))["results"]
    assert [entry["index"] for entry in found] == [1, 0, 2, 3][:number]


@pytest.mark.parametrize(
    ("path", "asked", "returned"),
    [(RERANK, None, True), ("/rerank", None, True), ("/v2/rerank", None, False)]
    + [(path, asked, asked) for path in (RERANK, "/rerank", "/v2/rerank") for asked in (True, False)],
)
def test_documents_are_returned_as_the_version_does_or_as_asked(http, path, asked, returned):
    found = answer(http.post(path, json=QUERY | {"return_documents": asked}))["results"]
    assert [("document" in entry) for entry in found] == [returned] * 4


def test_documents_may_be_objects_with_text_which_are_returned_whole(http):
    documents = [{"text": "b", "id": 7}, "aab", {"text": "a"}]
    found = answer(http.post(RERANK, json={"query": {"text": "aaa"}, "documents": documents}))["results"]
    assert [entry["document"] for entry in found] == [{"text": "a"}, {"text": "aab"}, {"text": "b", "id": 7}]


def test_long_texts_are_truncated_on_request(http):
    assert scores(http, text_1="a", text_2="b" * 99 + "a", truncate_prompt_tokens=1) == [pytest.approx(1)]
    cut = answer(http.post(RERANK, json=QUERY | {"documents": ["a" * 99], "truncate_prompt_tokens": -1}))
    assert cut["usage"]["prompt_tokens"] == 3 + 64


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (SCORE, {"text_1": "a"}, "text_1"),
        (SCORE, {}, "text_1"),
        (SCORE, {"text_1": "a", "documents": "b"}, "text_1"),
        (SCORE, PAIR | {"queries": "a"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": ["a"] * 21}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": ""}, "text_2"),
        (SCORE, {"queries": "a" * 65, "items": "b"}, "queries"),
        (SCORE, {"text_1": "a", "text_2": {"content": []}}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": [{"text": "b"}]}, "text_2"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"documents": ["a"]}, "query"),
        (RERANK, {"query": "", "documents": ["a"]}, "query"),
        (RERANK, {"query": ["a"], "documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"] * 21}, "documents"),
        (RERANK, {"query": "a", "documents": ["b", "a" * 65]}, "documents"),
        (RERANK, {"query": "a", "documents": ["b", 5]}, "documents.1"),
        (RERANK, {"query": "a", "documents": [{"title": "a"}]}, "documents.0"),
        (RERANK, QUERY | {"top_n": -1}, "top_n"),
        (RERANK, QUERY | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    ids=str,
)
def test_refusal_names_the_field(http, path, body, field):
    assert refusal(http.post(path, json=body))["param"] == field


@pytest.mark.parametrize(("path", "body"), [(SCORE, PAIR), (RERANK, QUERY)])
def test_what_only_a_cross_encoder_has_is_refused(http, path, body):
    for name in ("use_activation", "activation", "instruction", "chat_template", "softmax"):
        error = refusal(http.post(path, json=body | {name: True}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert "this model is not a cross-encoder" in error["message"]
        assert http.post(path, json=body | {name: False}).status_code == 200


@pytest.mark.parametrize(("path", "body"), [(SCORE, PAIR), (RERANK, QUERY)])
def test_every_unsupported_field_is_refused_by_name(http, path, body):
    for name in UNSUPPORTED_IN_SCORING.keys() - {"documents", "truncate_prompt_tokens"}:
        assert refusal(http.post(path, json=body | {name: {"a": 5}}))["param"] == name


@pytest.mark.parametrize("name", UNSUPPORTED_IN_DOCUMENTS)
def test_document_of_another_kind_than_text_is_refused(http, name):
    documents = ["a", {"text": "a", name: "http://x/1.png"}]
    error = refusal(http.post(RERANK, json={"query": "a", "documents": documents}))
    assert error["param"] == f"documents.1.{name}"


def test_unknown_model_is_not_found(http):
    assert http.post(SCORE, json=PAIR | {"model": "other"}).status_code == 404
    assert http.post(RERANK, json=QUERY | {"model": "other"}).status_code == 404


def test_query_is_embedded_once():
    client = CountingClient()
    with serving(client) as address:
        assert httpx.post(address.url + RERANK, json=QUERY).status_code == 200
    assert len(client.seen) == 1 + len(QUERY["documents"])


def test_more_texts_than_the_queue_holds_run_in_batches():
    with serving(CountingClient(capacity=4, max_queued_requests=4)) as address:
        found = httpx.post(address.url + SCORE, json={"text_1": "aaa", "text_2": ["ab"] * 9}).json()
    assert [entry["score"] for entry in found["data"]] == [cosine(1, 1)] * 9


def test_failed_engine_is_an_error():
    with serving(CountingClient(fail_after=0, failure=EngineFailed("a step raised"))) as address:
        assert httpx.post(address.url + RERANK, json=QUERY).status_code == 500


def test_first_tokens_of_documents_are_ranked(http):
    query = {"query": "a", "documents": ["abbbb", "aacc", "b"]}
    for most, expected in {1: [1, 1, 0], 2: [cosine_of(1, 1), 1, 0], 4: [cosine_of(1, 3), cosine_of(2, 2), 0]}.items():
        results = answer(http.post(RERANK, json=query | {"max_tokens_per_doc": most}))["results"]
        assert {each["index"]: each["relevance_score"] for each in results} == pytest.approx(dict(enumerate(expected)))
        assert [query["documents"][each["index"]] for each in results] == [each["document"]["text"] for each in results]
    long = {"query": "a", "documents": ["a" + "b" * 10_000], "max_tokens_per_doc": 10**30}
    assert refusal(http.post(RERANK, json=long))["param"] == "documents"
    assert answer(http.post(RERANK, json=long | {"max_tokens_per_doc": 64}))["usage"]["prompt_tokens"] == 65
    assert "use max_tokens_per_doc" in refusal(http.post(RERANK, json=query | {"max_doc_length": 5}))["message"]


def test_special_tokens_stay_around_the_first_tokens_of_a_document():
    tokenizer = Tokenizer(byte_tokenizer()._tokenizer, special_tokens={"bos_token": END}, add_bos=True, add_eos=False)
    engine = CountingClient(tokenizer=tokenizer)
    http = TestClient(create_app(engine, ServerSettings()))
    body = {"query": "a", "documents": ["abcd"], "max_tokens_per_doc": 2}
    answer(http.post(RERANK, json=body))
    assert tokenizer.decode(engine.seen[-1].token_ids, skip_special_tokens=False) == f"{END}ab"
    answer(http.post(RERANK, json=body | {"add_special_tokens": False}))
    assert tokenizer.decode(engine.seen[-1].token_ids, skip_special_tokens=False) == "ab"
