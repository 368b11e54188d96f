"""The run of a batch: each line of a file becomes a request to the server's own application, in this process."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2
from fastapi import FastAPI
from pydantic_core import from_json, to_json

from jaxserve.engine.client import EngineClient
from jaxserve.server.app import JSON_ROUTES
from jaxserve.server.batch.files import AnswersFile, Batch, Line, digest
from jaxserve.server.errors import response_parts
from jaxserve.server.http.body import json_fault, without_lone_surrogates
from jaxserve.server.http.offload import off_loop_if_large

logger = logging.getLogger(__name__)

URLS = tuple(route.path for route in JSON_ROUTES)
WITHOUT_RESPONSE = ("stream", "background")  # fields with which an endpoint does not return the response at once
SERVER = "http://127.0.0.1"  # no connection is made
HEADERS = {"content-type": "application/json"}
QUEUE_FULL = 503
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LINE_OVERHEAD_BYTES = 64 * 1024  # of a line, besides the body
MAX_SHOWN = 100  # characters of a wrong value in a message


class BadLine(Exception):
    """Raised for a line that is no request. `code` is the kind of fault, `custom_id` the line's, if it has one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None):
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


@dataclass(frozen=True)
class BatchRequest:
    """The request in a line of a batch, without its text. `id` is that of its answer."""

    id: str
    custom_id: str
    url: str
    body: bytes


@dataclass
class Progress:
    """The numbers of lines of a batch by what has become of them."""

    total: int
    earlier: int  # answered by an earlier run
    answered: int = 0  # responses with status 200
    failed: int = 0  # other responses, and lines that are no request

    @property
    def done(self) -> int:
        """Number of lines that need nothing more in this run."""
        return self.earlier + self.answered + self.failed


class Window:
    """The number of requests that may be in flight: as many as the engine's queue takes.

    It begins as wide as the queue. A refusal narrows it to the requests that were not refused, and each round of
    answers widens it by one.
    """

    def __init__(self, width: int):
        self.width = float(width)
        self.in_flight = 0
        self._room = asyncio.Condition()

    async def enter(self) -> None:
        """Wait until one more request may be in flight, and count it."""
        async with self._room:
            await self._room.wait_for(lambda: self.in_flight < int(self.width))
            self.in_flight += 1

    async def leave(self, *, refused: bool) -> None:
        """Count a request no longer that was answered, or refused for lack of room."""
        async with self._room:
            self.in_flight -= 1
            self.width = float(max(1, self.in_flight)) if refused else self.width + 1 / self.width
            self._room.notify(max(0, int(self.width) - self.in_flight))


async def run_batch(
    app: FastAPI, batch: Batch, progress: Progress, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Answer all lines of a batch that have no answer yet, and count them in `progress`.

    Answers are written as they come, in any order. Requests in flight when the task is cancelled have no answer. Raise
    EngineFailed if the engine fails, and ConfigError if an answer cannot be written.
    """
    with AnswersFile(batch.output) as answers:
        run = _Run(app, batch, answers, progress, on_progress)
        try:
            async with asyncio.TaskGroup() as group:
                await run.start_all(group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


class _Run:
    """One run of a batch."""

    def __init__(
        self, app: FastAPI, batch: Batch, answers: AnswersFile, progress: Progress, on_progress: Callable[[], None]
    ):
        self._client: EngineClient = app.state.server.client()
        self._transport = httpx2.ASGITransport(app)
        self._batch, self._answers = batch, answers
        self._progress, self._on_progress = progress, on_progress
        self._window = Window(self._client.info.max_queued_requests)
        self._custom_ids: set[bytes] = set()  # as checksums, which bound the memory

    async def start_all(self, group: asyncio.TaskGroup) -> None:
        """Start a task for each request, as the window allows."""
        for line in self._batch.lines():
            await asyncio.sleep(0)  # a chance for answers, and for Ctrl-C
            try:
                request = await self._request(line)
            except BadLine as bad:
                self._answers.add_error(line.id, bad.custom_id, bad.code, str(bad))
                self._count(succeeded=False)
                continue
            if line.key not in self._batch.answered:
                await self._window.enter()
                group.create_task(self._answer(request))

    async def _request(self, line: Line) -> BatchRequest:
        """Return the request in a line. Raise BadLine if there is none, or its custom_id is not unique."""
        text = line.text or b""
        request = await off_loop_if_large(len(text), parse_line, line, self._batch.max_line_bytes)
        key = digest(request.custom_id.encode())
        if key in self._custom_ids:
            message = f"custom_id {request.custom_id!r} is that of an earlier line: it must be unique"
            raise BadLine("duplicate_custom_id", message, request.custom_id)
        self._custom_ids.add(key)
        return request

    async def _answer(self, request: BatchRequest) -> None:
        """Send a request, again when others have ended if the queue is full, and write its answer."""
        while True:
            status, request_id, body = await self._send(request)
            refused = status == QUEUE_FULL and self._window.in_flight > 1
            await self._window.leave(refused=refused)
            if not refused:
                break
            await self._window.enter()
        if status >= 500:
            self._client.check_health()  # a dead engine ends the run: all other requests would fail as well
        self._answers.add(request.id, request.custom_id, status, request_id or request.id, body)
        self._count(succeeded=status == 200)

    async def _send(self, request: BatchRequest) -> tuple[int, str | None, bytes]:
        """Return the status of the app's response, its id and its body."""
        try:
            sent = httpx2.Request("POST", SERVER + request.url, headers=HEADERS, content=request.body)
            response = await self._transport.handle_async_request(sent)
            return response.status_code, response.headers.get("x-request-id"), await response.aread()
        except Exception as error:
            logger.exception("the request %r failed", request.custom_id)
            status, body, _ = response_parts(error)
            return status, None, to_json(body)

    def _count(self, *, succeeded: bool) -> None:
        self._progress.answered += succeeded
        self._progress.failed += not succeeded
        self._on_progress()


def parse_line(line: Line, max_bytes: int) -> BatchRequest:
    """Return the request in a line of a batch. Raise BadLine, naming the field, if there is none."""
    if line.text is None:
        raise BadLine(
            "line_too_long",
            f"line {line.number} has more than {max_bytes} bytes, which is the limit (--max-body-mb)",
        )
    try:
        value = from_json(without_lone_surrogates(line.text.removeprefix(BYTE_ORDER_MARK)), allow_inf_nan=False)
    except ValueError as error:
        raise BadLine("invalid_json", f"line {line.number} is not valid JSON: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise BadLine("invalid_json", f"line {line.number} is not a JSON object")
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine("invalid_custom_id", f"line {line.number}: custom_id must be a string that is not empty")
    if method not in ("POST", None):
        raise BadLine("invalid_method", f"method is {_shown(method)}: it must be POST", custom_id)
    if url not in URLS:
        raise BadLine("invalid_url", f"url is {_shown(url)}: choose from {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be a JSON object", custom_id)
    for field in WITHOUT_RESPONSE:
        if body.get(field):
            message = f"body.{field} must be false: a batch has whole responses"
            raise BadLine("unsupported_parameter", message, custom_id)
    return BatchRequest(line.id, custom_id, url, to_json(body, inf_nan_mode="constants"))


def _shown(value: Any) -> str:
    return repr(value)[:MAX_SHOWN]
