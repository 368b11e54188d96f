"""Batches: files of requests that are answered in this process, and continued after an interruption."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from jaxserve.core.errors import ConfigError, EngineFailed, NonFiniteOutput
from jaxserve.server.app import create_app
from jaxserve.server.batch.files import open_batch
from jaxserve.server.batch.run import URLS, Progress, Window, run_batch
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.support.file_size import file_size_limit

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MAX_LINE = 10_000


def request(custom_id: str = "a", url: str = COMPLETIONS, **body: Any) -> dict:
    body = body or {"prompt": "hi", "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


class Files:
    """The input and the output of a batch."""

    def __init__(self, folder: Path):
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: dict | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("".join(f"{text}\n" for text in texts))

    def answers(self) -> list[dict]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def by_id(self) -> dict[str, dict]:
        answers = self.answers()
        found = {answer["custom_id"]: answer for answer in answers}
        assert len(found) == len(answers)
        return found

    def run(self, client: FakeClient | None = None, *, overwrite: bool = False, **settings: Any) -> Progress:
        """Answer what is left, and return what has become of the lines."""
        batch = open_batch(self.source, self.output, MAX_LINE, overwrite=overwrite)
        progress = Progress(batch.total, earlier=batch.total - batch.remaining)
        asyncio.run(run_batch(create_app(client or FakeClient(), ServerSettings(**settings)), batch, progress))
        return progress


def statuses(answers: dict[str, dict]) -> dict[str, int | None]:
    return {name: (answer["response"] or {}).get("status_code") for name, answer in answers.items()}


# answers


def test_every_request_is_answered_under_its_id(files):
    files.write(
        request("chat", CHAT, messages=[{"role": "user", "content": "hi"}]),
        request("text", max_tokens=3, prompt="hi"),
        request("vector", EMBEDDINGS, input="hi"),
        request("ids", "/tokenize", prompt="hi"),
        request("rank", "/v1/rerank", query="a", documents=["b"]),
    )
    progress = files.run()
    answers = files.by_id()
    assert statuses(answers) == dict.fromkeys(["chat", "text", "vector", "ids", "rank"], 200)
    assert answers["chat"]["response"]["body"]["object"] == "chat.completion"
    assert answers["text"]["response"]["body"]["choices"][0]["text"] == "Hel"
    assert answers["vector"]["response"]["body"]["data"][0]["object"] == "embedding"
    assert (progress.total, progress.answered, progress.failed) == (5, 5, 0)


def test_answer_has_openais_form(files):
    files.write(request())
    files.run()
    (answer,) = files.answers()
    assert answer.keys() == {"id", "custom_id", "response", "error"}
    assert answer["id"].startswith("batch_req_")
    assert answer["error"] is None
    assert answer["response"].keys() == {"status_code", "request_id", "body"}
    assert answer["response"]["request_id"] == answer["response"]["body"]["id"]


def test_refused_request_has_the_servers_error_as_its_response(files):
    files.write(request("a", prompt="hi", temperature=-1), request("b", prompt="hi", model="other"))
    progress = files.run()
    answers = files.by_id()
    assert statuses(answers) == {"a": 400, "b": 404}
    assert answers["a"]["response"]["body"]["error"]["param"] == "temperature"
    assert (progress.answered, progress.failed) == (0, 2)


def test_settings_of_the_server_apply(files):
    files.write(request("a", prompt="hi", model="alias"), request("b", prompt=["a", "b"]))
    files.run(served_model_names=("alias",), max_prompts=1)
    assert statuses(files.by_id()) == {"a": 200, "b": 400}


@pytest.mark.parametrize(
    ("line", "code", "custom_id"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_json", None),
        ('{"custom_id": NaN}', "invalid_json", None),
        ("\\ud800", "invalid_json", None),
        ({"url": COMPLETIONS, "body": {}}, "invalid_custom_id", None),
        (request("") | {"body": {}}, "invalid_custom_id", None),
        (request() | {"custom_id": 5}, "invalid_custom_id", None),
        (request() | {"method": "GET"}, "invalid_method", "a"),
        (request() | {"url": "/v1/nothing"}, "invalid_url", "a"),
        (request() | {"url": "/admin/plan"}, "invalid_url", "a"),
        (request() | {"url": "http://example.org/v1/completions"}, "invalid_url", "a"),
        (request() | {"url": ["/v1/completions"]}, "invalid_url", "a"),
        (request() | {"body": None}, "invalid_body", "a"),
        (request() | {"body": "hi"}, "invalid_body", "a"),
        (request(prompt="hi", stream=True), "unsupported_parameter", "a"),
        (request(url="/v1/responses", input="hi", background=True), "unsupported_parameter", "a"),
        ('"' + "x" * MAX_LINE + '"', "line_too_long", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_line_has_an_error_and_ends_nothing(files, line, code, custom_id):
    files.write(request("first"), line, request("last"))
    progress = files.run()
    answers = files.by_id()
    assert statuses(answers) == {"first": 200, custom_id: None, "last": 200}
    assert answers[custom_id]["error"]["code"] == code
    assert answers[custom_id]["error"]["message"]
    assert (progress.answered, progress.failed) == (2, 1)


def test_second_request_with_the_same_id_is_an_error(files):
    files.write(request("a"), request("b"), request("a", prompt="other"), request("b"))
    for _ in range(2):  # also when the first ones have been answered earlier
        progress = files.run()
        answers = files.answers()
        errors = [answer["custom_id"] for answer in answers if answer["error"]]
        assert sorted(errors) == ["a", "b"]
        assert sorted(answer["custom_id"] for answer in answers if answer["response"]) == ["a", "b"]
        assert (progress.earlier + progress.answered, progress.failed) == (2, 2)


def test_blank_lines_and_a_byte_order_mark_are_skipped(files):
    files.source.write_bytes(b"\xef\xbb\xbf" + json.dumps(request()).encode() + b"\r\n\r\n  \n")
    assert files.run().total == 1
    assert statuses(files.by_id()) == {"a": 200}


def test_body_is_sent_unchanged(files):
    client = FakeClient()
    files.write(request(prompt="é ☺", seed=2**62, temperature=0.1))
    files.run(client)
    prompt, params, *_ = client.seen[0]
    assert (prompt.text, params.seed, params.temperature) == ("é ☺", 2**62, 0.1)


def test_number_too_large_for_a_float_is_refused_as_by_the_server(files):
    files.write(json.dumps(request(prompt="hi", temperature=7)).replace("7", "1e999"))
    assert files.run().failed == 1


def test_all_routes_with_a_json_body_can_be_used_but_those_of_operators():
    paths = create_app(FakeClient(), ServerSettings()).openapi()["paths"]
    posts = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert {CHAT, "/v1/responses", "/v1/messages"} < posts <= set(URLS)
    assert not any(url.startswith(("/admin", "/dashboard")) for url in URLS)


# continuing


def test_finished_batch_needs_nothing_more(files):
    files.write(request("a"), request("b"))
    files.run()
    before, client = files.output.read_bytes(), FakeClient()
    assert files.run(client).earlier == 2
    assert files.output.read_bytes() == before
    assert client.seen == []


def test_only_missing_answers_are_added(files):
    files.write(*(request(f"{i}") for i in range(20)))
    files.run()
    lines = files.output.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    files.output.write_text("".join(lines[:12]))
    client = FakeClient()
    assert files.run(client).answered == len(client.seen) == 8
    assert files.output.read_text().startswith("".join(lines[:12]))
    assert statuses(files.by_id()) == {f"{i}": 200 for i in range(20)}


@pytest.mark.parametrize("cut", [1, 10, 30, 100, -1])
def test_line_that_was_cut_off_is_done_again(files, cut):
    files.write(request("a"), request("b"))
    files.run()
    first, last = files.output.read_bytes().splitlines(keepends=True)
    files.output.write_bytes(first + last[:cut])
    assert files.run().answered == 1
    assert files.output.read_bytes().startswith(first)
    assert statuses(files.by_id()) == {"a": 200, "b": 200}


def test_output_of_one_line_that_was_cut_off_is_continued(files):
    files.write(request("a"))
    files.output.write_bytes(b'{"id":"batch_req_12')
    files.run()
    assert statuses(files.by_id()) == {"a": 200}


def test_failed_requests_are_run_again(files):
    files.write(request("a"), "{", request("b", prompt="hi", model="alias"))
    failing = FakeClient(fail_after=1, failure=NonFiniteOutput("logits"))
    assert files.run(failing).failed == 3
    assert statuses(files.by_id()) == {"a": 500, None: None, "b": 404}
    assert files.run(served_model_names=("alias",)).answered == 2
    assert statuses(files.by_id()) == {"a": 200, None: None, "b": 200}


def test_corrected_line_is_answered(files):
    files.write(request("a"), "{")
    files.run()
    files.write(request("a"), request("b"), request("c"))
    assert files.run().earlier == 1
    assert statuses(files.by_id()) == {"a": 200, "b": 200, "c": 200}


@pytest.mark.parametrize(
    "content",
    [
        "important\n",
        "important",
        '{"custom_id": "a"}\n',
        '{"id": "batch_req_00", "custom_id": "a", "response": null, "error": {}}\n',
        '{"id": "other", "custom_id": "a", "response": {"status_code": 200}, "error": null}\n',
    ],
)
def test_file_that_is_no_output_of_this_input_is_left_alone(files, content):
    files.write(request("a"))
    files.output.write_text(content)
    with pytest.raises(ConfigError, match="--overwrite"):
        files.run()
    assert files.output.read_text() == content


def test_changed_request_does_not_take_the_old_answer(files):
    files.write(request("a"), request("b"))
    files.run()
    before = files.output.read_bytes()
    files.write(request("a", prompt="changed"), request("b"))
    with pytest.raises(ConfigError, match=r"not in .*--overwrite"):
        files.run()
    assert files.output.read_bytes() == before
    assert files.run(overwrite=True).answered == 2


def test_input_is_not_overwritten_by_its_answers(files):
    files.write(request())
    files.output = files.source
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is the input"):
            files.run(overwrite=overwrite)
    assert files.answers() == [request()]


def test_missing_input_is_named(files):
    with pytest.raises(ConfigError, match=r"no file .*in\.jsonl"):
        files.run()
    assert not files.output.exists()


# the engine's queue, failures and cancellation


def test_queue_is_kept_full_but_no_request_is_lost(files):
    client = PeakClient(capacity=5)
    files.write(*(request(f"{i}", prompt="hi") for i in range(60)))
    assert files.run(client).answered == 60
    assert client.peak == 5
    assert client.refused < 60


class PeakClient(FakeClient):
    """A client that notes the most requests in flight, and how many it has refused."""

    peak = refused = 0

    def _admit(self, *given: Any, **options: Any) -> str:
        try:
            admitted = super()._admit(*given, **options)
        except Exception:
            self.refused += 1
            raise
        self.peak = max(self.peak, len(self.active))
        return admitted


def test_request_that_an_empty_queue_refuses_is_not_repeated_for_ever(files):
    files.write(request("a"), request("b"))
    assert files.run(FakeClient(capacity=0)).failed == 2
    assert statuses(files.by_id()) == {"a": 503, "b": 503}


def test_refusals_narrow_the_window_and_answers_widen_it():
    async def used() -> None:
        window = Window(4)
        for _ in range(4):
            await window.enter()
        await window.leave(refused=True)
        assert window.width == 3
        blocked = asyncio.ensure_future(window.enter())
        await asyncio.sleep(0)
        assert not blocked.done()
        for _ in range(3):
            await window.leave(refused=False)
        await blocked
        assert 3 < window.width < 4.1

    asyncio.run(used())


def test_failed_engine_ends_the_run_and_leaves_the_rest_to_the_next(files):
    files.write(*(request(f"{i}") for i in range(10)))
    client = FakeClient(fail_after=1, healthy=False)
    with pytest.raises(EngineFailed):
        files.run(client)
    assert files.answers() == []
    assert files.run().answered == 10


def test_full_disk_ends_the_run_and_leaves_the_rest_to_the_next(files):
    files.write(*(request(f"{i}") for i in range(10)))
    with file_size_limit(1500), pytest.raises(ConfigError, match=f"^cannot write {files.output}: File too large"):
        files.run()
    assert files.output.stat().st_size == 1500
    whole = files.output.read_bytes().count(b"\n")
    assert files.run().answered == 10 - whole
    assert len(files.answers()) == 10


def test_full_disk_keeps_the_answers_of_an_earlier_run(files):
    files.write(*(request(f"{i}") for i in range(10)))
    files.run()
    before = files.output.read_bytes() + b'{"id":"batch_req_'
    files.output.write_bytes(before)
    with file_size_limit(1500), pytest.raises(ConfigError, match=f"^cannot write {files.output}: File too large"):
        files.run()
    assert files.output.read_bytes() == before
    assert sorted(path.name for path in files.output.parent.iterdir()) == sorted([files.source.name, files.output.name])


def test_cancelled_run_aborts_its_requests_and_can_be_continued(files):
    files.write(*(request(f"{i}") for i in range(10)))
    client = FakeClient(delay=60, delay_after=1)

    async def cancelled() -> None:
        batch = open_batch(files.source, files.output, MAX_LINE)
        run = asyncio.ensure_future(run_batch(create_app(client, ServerSettings()), batch, Progress(10, 0)))
        while len(client.active) < 10:
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert not client.active

    asyncio.run(cancelled())
    assert files.answers() == []
    assert files.run().answered == 10
