"""The measured server: starting it if the options say so, and what it reports about its model."""

import contextlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2

from jaxserve.bench.client import OK, Target, refusal
from jaxserve.bench.options import ServerOptions
from jaxserve.bench.redaction import masked_text, without_key
from jaxserve.bench.spawn import spawned
from jaxserve.bench.stream import on_one_line
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.console.progress import progress_bar
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.server_address import ServerAddress, tls_hint, trusted_authorities

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
NO_MODEL_LIST = (404, 405, 501)  # statuses of servers without /v1/models
UNAUTHORIZED = ("HTTP 401", "HTTP 403")


@dataclass(frozen=True)
class ServedModel:
    """A served model as the server describes it; `root` (if known) is where it was loaded from."""

    name: str
    root: str | None
    max_model_len: int | None


@contextlib.contextmanager
def serving(server: ServerOptions) -> Iterator[str]:
    """Yield the base URL of the server to measure, and stop the server at the end if it was spawned."""
    if not server.spawn:
        yield server.url.rstrip("/").removesuffix("/v1")
        return
    with contextlib.ExitStack() as stack:
        with progress_bar("starting the server", keep=False):
            url = stack.enter_context(spawned(shlex.split(server.serve_args), timeout_s=server.spawn_timeout))
        yield url


def discover(base_url: str, server: ServerOptions) -> ServedModel:
    """Ask the server for its model and return it.

    A server without a list of models is assumed to serve the requested model. Raise ConfigError if it does not answer,
    or if the requested model is not served.
    """
    headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    where, address = masked_text(base_url), ServerAddress.parse(base_url)
    transport = httpx2.HTTPTransport(uds=address.socket) if address.socket else None
    try:
        with httpx2.Client(timeout=30, trust_env=False, verify=trusted_authorities(), transport=transport) as http:
            answer = http.get(f"{address.base_url}/v1/models", headers=headers)
        if answer.status_code in NO_MODEL_LIST and server.model:
            return ServedModel(server.model, None, None)
        if answer.status_code != OK:
            raise ValueError(refusal(answer.status_code, answer.content))
        models = [ServedModel(m["id"], m.get("root"), m.get("max_model_len")) for m in answer.json()["data"]]
    except httpx2.ConnectError as error:
        hint = tls_hint(error) or ": give the address of a running server (--base-url), or --spawn to start one"
        raise ConfigError(f"cannot reach {where}: {on_one_line(str(error))}{hint}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = on_one_line(without_key(masked_text(str(error)), server.api_key)) or type(error).__name__
        hint = " (--api-key)" if reason.startswith(UNAUTHORIZED) else tls_hint(error)
        raise ConfigError(f"{where}/v1/models returned no list of models: {reason}{hint}") from error
    if not models:
        raise ConfigError(f"{where} serves no models")
    for model in models:
        if server.model in (None, model.name):
            return model
    names = ", ".join(model.name for model in models)
    raise ConfigError(f"{where} does not serve model {server.model!r}: choose from {names} (--model)")


def request_target(base_url: str, model: ServedModel, server: ServerOptions) -> Target:
    """Return the target of all requests of a run.

    Raise ConfigError if --extra-body is not a JSON object.
    """
    try:
        extra = json.loads(server.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {server.extra_body}")
    return Target(
        base_url,
        model.name,
        endpoint=ENDPOINTS["chat" if server.is_chat else "completions"],
        api_key=server.api_key,
        extra_body=({} if server.temperature is None else {"temperature": server.temperature}) | extra,
        ignore_eos=bool(server.ignore_eos),
        timeout_s=server.timeout,
    )


def served_vocabulary(model: ServedModel, server: ServerOptions) -> Vocabulary:
    """Return the tokenizer to make prompts with: --tokenizer, or what the server says its model is.

    Raise ConfigError if no tokenizer is found.
    """
    candidates = [server.tokenizer] if server.tokenizer else [model.name, model.root]
    if server.spawn and not server.tokenizer:
        # The arguments may begin with MODEL.
        candidates = [*shlex.split(server.serve_args)[:1], *candidates]
    problems = []
    for candidate in dict.fromkeys(candidates):
        if candidate and not candidate.startswith("-"):
            try:
                return Vocabulary.load(candidate)
            except JaxserveError as error:
                problems.append(str(error))
    raise ConfigError(f"found no tokenizer to make prompts with: {'; '.join(problems)} (--tokenizer)")
