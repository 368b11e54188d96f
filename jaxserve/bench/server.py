"""The server that is measured: started if asked to, and what it says of itself."""

import contextlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from rich.console import Console

from jaxserve.bench.client import Target
from jaxserve.bench.options import ServerOptions
from jaxserve.bench.spawn import spawned
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.core.errors import ConfigError, JaxserveError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class ServedModel:
    """What a server says of the model it serves; `root` is where the model came from, if it tells."""

    name: str
    root: str | None
    max_model_len: int | None


@contextlib.contextmanager
def serving(server: ServerOptions) -> Iterator[str]:
    """The base URL of the server to measure; one that was spawned is stopped at the end."""
    if not server.spawn:
        yield server.base_url.rstrip("/").removesuffix("/v1")
        return
    with contextlib.ExitStack() as stack:
        with Console(stderr=True).status("starting the server"):
            url = stack.enter_context(spawned(shlex.split(server.serve_args), timeout_s=server.spawn_timeout))
        yield url


def discover(base_url: str, server: ServerOptions) -> ServedModel:
    """Asks the server for its model. Raises `ConfigError` if there is no answer, or not the model asked for."""
    headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        answer = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=30, trust_env=False)
        answer.raise_for_status()
        models = answer.json()["data"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{base_url}/v1/models gave no list of models: {error or type(error).__name__}") from error
    for model in models:
        if server.model in (None, model["id"]):
            return ServedModel(model["id"], model.get("root"), model.get("max_model_len"))
    names = ", ".join(model["id"] for model in models) or "none"
    raise ConfigError(f"{base_url} does not serve {server.model!r} (--model); it serves: {names}")


def target(base_url: str, model: ServedModel, server: ServerOptions) -> Target:
    """What every request of the run says. Raises `ConfigError` when --extra-body is no JSON object."""
    try:
        extra = json.loads(server.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {server.extra_body}")
    return Target(
        base_url,
        model.name,
        endpoint=ENDPOINTS[server.endpoint],
        api_key=server.api_key,
        extra_body=extra,
        ignore_eos=server.ignore_eos,
        timeout_s=server.timeout,
    )


def served_vocabulary(model: ServedModel, server: ServerOptions) -> Vocabulary:
    """The tokenizer that prompts are made with. Raises `ConfigError` when nothing says which."""
    candidates = [server.tokenizer] if server.tokenizer else [model.name, model.root]
    if server.spawn and not server.tokenizer:
        candidates = [*shlex.split(server.serve_args)[:1], *candidates]  # MODEL, if the arguments begin with it
    problems = []
    for candidate in dict.fromkeys(candidates):
        if candidate and not candidate.startswith("-"):
            try:
                return Vocabulary.load(candidate)
            except JaxserveError as error:
                problems.append(str(error))
    raise ConfigError(f"no tokenizer to make prompts with (--tokenizer): {'; '.join(problems)}")
