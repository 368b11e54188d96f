"""A client that sends one request to an OpenAI-compatible server and records when each part of the answer arrives."""

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
from jaxserve.core.server_address import ServerAddress, trusted_authorities

OK = 200
HOURS = 3600.0
# Idle connections are closed after this time. Servers close theirs after 5 s or more, which could be while we write.
KEEP_ALIVE_S = 2.0


@dataclass(frozen=True)
class Target:
    """The server to measure, and the fields that all requests to it share."""

    base_url: str
    model: str
    endpoint: str = "/v1/completions"  # chat if it ends in /chat/completions
    api_key: str | None = field(default=None, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # overrides all other fields of a body
    ignore_eos: bool = False
    timeout_s: float = 6 * HOURS

    @property
    def address(self) -> ServerAddress:
        """The address to which requests are sent."""
        return ServerAddress.parse(self.base_url)

    @property
    def url(self) -> str:
        """The URL that requests are posted to."""
        return self.address.base_url + self.endpoint

    @property
    def is_chat(self) -> bool:
        """True if prompts are sent as chat messages."""
        return self.endpoint.endswith("/chat/completions")

    def body(self, sample: Sample) -> dict[str, Any]:
        """Return the JSON body of one request.

        Raise ValueError for token ids and a chat endpoint, which takes text.
        """
        if self.is_chat and not isinstance(sample.prompt, str):
            raise ValueError("a chat endpoint takes text, not token ids")
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": sample.prompt}]}
        if not self.is_chat:
            prompt = {"prompt": sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt)}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": sample.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }


class Client:
    """A client of one server, on connections that are kept alive.

    It is a context manager: connections are open inside the `async with` block.
    """

    def __init__(self, target: Target):
        self.target = target
        self._url, self._socket = target.url, target.address.socket
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if target.api_key:
            self._headers["authorization"] = f"Bearer {target.api_key}"

    async def __aenter__(self) -> Self:
        options: dict[str, Any] = {"limit": 0, "keepalive_timeout": KEEP_ALIVE_S}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._socket, **options)
            if self._socket
            else aiohttp.TCPConnector(ssl=trusted_authorities(), **options),
            cookie_jar=aiohttp.DummyCookieJar(),  # requests stand for different users
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.close()

    async def send(self, sample: Sample, record: RequestRecord, now: Callable[[], float] = time.monotonic) -> None:
        """Send one request and read its answer to the end, filling in `record`.

        Every failure is stored in `record.error`; nothing is raised. `now` returns the seconds since the start of the
        run. If the call is cancelled, `record.end_s` stays None.
        """
        try:
            with _errors_recorded(record, self.target.timeout_s):
                body = json.dumps(self.target.body(sample)).encode()
                record.sent_s = now()
                async with (
                    asyncio.timeout(self.target.timeout_s),
                    self._http.post(self._url, data=body, allow_redirects=False) as response,
                ):
                    record.status = response.status
                    if response.status == OK:
                        await _read(response, record, now)
                    else:
                        record.error = refusal(response.status, await response.read())
        except asyncio.CancelledError:
            # A cancelled request has neither failed nor completed.
            record.error = None
            raise
        if record.error:
            # Masked before it is cut, because half a key is a secret too.
            record.error = on_one_line(without_key(record.error, self.target.api_key))
        record.end_s = now()


async def _read(response: aiohttp.ClientResponse, record: RequestRecord, now: Callable[[], float]) -> None:
    """Record the time of each token as it arrives and, also after a failure, all that has arrived."""
    parser, answer, events = EventParser(), AnswerReader(record), 0
    try:
        async for chunk in response.content.iter_any():
            # The time of arrival, so it is taken before any parsing.
            time_s = now()
            for data in parser.feed(chunk):
                answer.feed(data, time_s)
                events += 1
        time_s = now()
        for data in parser.close():
            answer.feed(data, time_s)
            events += 1
        if not events:
            content_type = response.headers.get("content-type", "no content type")
            record.error = f"the answer is not a stream of events: {content_type}"
    except aiohttp.ClientError as error:
        record.error = _connection_error(error)
    finally:
        answer.close()


@contextlib.contextmanager
def _errors_recorded(record: RequestRecord, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        record.error = f"timeout after {timeout_s:g} s"
    except aiohttp.ClientConnectionError as error:
        record.error = _connection_error(error)
    except aiohttp.ClientResponseError as error:
        record.error = f"the answer is not HTTP: {error.message}"
    except (aiohttp.ClientError, ValueError, TypeError) as error:
        record.error = f"cannot send the request: {error}"


def _connection_error(error: aiohttp.ClientError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ECONNREFUSED:
        return "connection refused"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error}"
    if number in (errno.ECONNRESET, errno.EPIPE):
        return "connection reset"
    return "connection closed before the answer was complete"


def refusal(status: int, body: bytes) -> str:
    """Return a response's status with the message of its body, if it has one, uncut and unmasked."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError):
        text = message_of(json.loads(text))
    return f"HTTP {status}: {text.strip()}".rstrip(": ")
