"""One request to an OpenAI-compatible server, and when each part of its answer came."""

import asyncio
import contextlib
import errno
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from jaxserve.bench.record import RequestRecord
from jaxserve.bench.redaction import without_key
from jaxserve.bench.stream import AnswerReader, EventParser, message_of, on_one_line
from jaxserve.bench.workload import Sample

OK = 200
HOURS = 3600.0
KEEP_ALIVE_S = 2.0  # idle for longer: closed; servers close theirs after 5 s or more, perhaps just as we write


@dataclass(frozen=True)
class Target:
    """The server that is measured, and what every request to it says."""

    base_url: str
    model: str
    endpoint: str = "/v1/completions"  # or one that ends in /chat/completions
    api_key: str | None = field(default=None, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # has the last word
    ignore_eos: bool = False
    timeout_s: float = 6 * HOURS

    @property
    def url(self) -> str:
        """Where requests are posted to."""
        return self.base_url.rstrip("/") + self.endpoint

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as messages."""
        return self.endpoint.endswith("/chat/completions")

    def body(self, sample: Sample) -> dict[str, Any]:
        """The JSON of one request. Raises ValueError for token ids to a chat endpoint, which takes text."""
        if self.is_chat and not isinstance(sample.prompt, str):
            raise ValueError("a chat endpoint takes text, not token ids")
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": sample.prompt}]}
        if not self.is_chat:
            asked = {"prompt": sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt)}
        return {
            "model": self.model,
            **asked,
            "max_tokens": sample.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }


class Client:
    """Sends requests to one server on connections that are kept alive. A context manager: open while inside."""

    def __init__(self, target: Target):
        self.target = target
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if target.api_key:
            self._headers["authorization"] = f"Bearer {target.api_key}"

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),  # every request is another user's
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.close()

    async def send(self, sample: Sample, record: RequestRecord, now: Callable[[], float] = time.monotonic) -> None:
        """One request to its end. Mutates `record`: every failure is told there, in `error`; nothing is raised.

        `now` gives the seconds since the start of the run. When cancelled, `record.end_s` stays None.
        """
        try:
            with _told(record, self.target.timeout_s):
                body = json.dumps(self.target.body(sample)).encode()
                record.sent_s = now()
                async with (
                    asyncio.timeout(self.target.timeout_s),
                    self._http.post(self.target.url, data=body, allow_redirects=False) as response,
                ):
                    record.status = response.status
                    if response.status == OK:
                        await _read(response, record, now)
                    else:
                        record.error = refusal(response.status, await response.read())
        except asyncio.CancelledError:
            record.error = None  # neither failed nor completed
            raise
        if record.error:  # masked before it is cut: also half of a key is a secret
            record.error = on_one_line(without_key(record.error, self.target.api_key))
        record.end_s = now()


async def _read(response: aiohttp.ClientResponse, record: RequestRecord, now: Callable[[], float]) -> None:
    """Mutates the record: the times of its tokens as they come, and in any case what there is at the end."""
    parser, answer, events = EventParser(), AnswerReader(record), 0
    try:
        async for chunk in response.content.iter_any():
            time_s = now()  # before any parsing: this is when it came
            for data in parser.feed(chunk):
                answer.feed(data, time_s)
                events += 1
        time_s = now()
        for data in parser.close():
            answer.feed(data, time_s)
            events += 1
        if not events:
            record.error = f"the answer is no stream of events: {response.headers.get('content-type', 'of no type')}"
    except aiohttp.ClientError as error:
        record.error = _broken(error)
    finally:
        answer.close()


@contextlib.contextmanager
def _told(record: RequestRecord, timeout_s: float) -> Iterator[None]:
    """Turns what can go wrong into the record's `error`."""
    try:
        yield
    except TimeoutError:
        record.error = f"timeout after {timeout_s:g} s"
    except aiohttp.ClientConnectionError as error:
        record.error = _broken(error)
    except aiohttp.ClientResponseError as error:
        record.error = f"the answer is not HTTP: {error.message}"
    except (aiohttp.ClientError, ValueError, TypeError) as error:
        record.error = f"cannot send the request: {error}"


def _broken(error: aiohttp.ClientError) -> str:
    """What happened to the connection, in plain words."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ECONNREFUSED:
        return "connection refused"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error}"
    if number in (errno.ECONNRESET, errno.EPIPE):
        return "connection reset"
    return "connection closed before the answer was complete"


def refusal(status: int, body: bytes) -> str:
    """The status, and the message of the body if it has one, whole and as it is."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError):
        text = message_of(json.loads(text))
    return f"HTTP {status}: {text.strip()}".rstrip(": ")
