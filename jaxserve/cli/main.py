"""The command line: `jaxserve serve`, `generate` and `chat`; `bench`, `plan`, `sim` and others have their own files."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve._version import __version__
from jaxserve.cli.bench import app as bench
from jaxserve.cli.options import (
    IN_TERMINAL,
    ChatSamplingOptions,
    Given,
    OptionsOf,
    SamplingOptions,
    expand_options,
    help_of,
)
from jaxserve.cli.plan import app as plan
from jaxserve.cli.profile import profile
from jaxserve.cli.quantize import app as quantization
from jaxserve.cli.sim import sim
from jaxserve.cli.terminal import (
    Commands,
    console,
    read_stdin,
    replace_unknown_characters,
    tell,
    told_progress,
)
from jaxserve.cli.vllm_spelling import VllmCommand
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, NoTokenizer, RequestError
from jaxserve.core.options import given, options_of
from jaxserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from jaxserve.core.request import RequestOutput
    from jaxserve.core.sampling import SamplingParams
    from jaxserve.engine.client import EngineClient
    from jaxserve.llm import LLM

# What is slow to import is imported by the commands, so that --help is fast.

app = typer.Typer(
    name="jaxserve",
    help="LLM serving on JAX/XLA.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench)
app.add_typer(plan)
app.add_typer(quantization)
app.command()(profile)
app.command(cls=VllmCommand)(sim)
KEYS = ("JAXSERVE_API_KEY", "JAXSERVE_ADMIN_KEY")  # environment variables
ENGINE_FIELDS = tuple(field.name for field in options_of(EngineConfig))
MODEL = next(help_of(field) for field in options_of(EngineConfig) if field.name == "model")
Model = Annotated[str | None, typer.Option(help=MODEL, rich_help_panel="Model", show_default=False)]
TerminalOptions = Annotated[Given, OptionsOf(EngineConfig, IN_TERMINAL)]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False) -> None:
    if version:
        print(f"jaxserve {__version__}")
        raise typer.Exit


@app.command()
@expand_options
def serve(
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these options, or a name in configs/serve.")
    ] = None,
    engine: Annotated[Given, OptionsOf(EngineConfig, [name for name in ENGINE_FIELDS if name != "model"])],
    server: Annotated[Given, OptionsOf(ServerSettings)],
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    from jaxserve.server.options import read_config, resolve
    from jaxserve.server.runner import run_server

    for name in KEYS:
        if os.environ.get(name) == "":
            raise ConfigError(f"{name} is empty: unset it to serve without a key")
    chosen = engine | server | ({} if model is None else {"model": model})
    engine_config, settings = resolve(read_config(config) if config else {}, chosen)
    _configure_logging(settings.log_level, access=settings.access_log)

    def load() -> "EngineClient":
        from jaxserve.build import build_async_engine
        from jaxserve.engine.model_tokenizer import check_serves_text

        check_serves_text(engine_config)
        with told_progress() as progress:
            return build_async_engine(engine_config, progress)

    console.print(f"jaxserve {__version__}: loading {engine_config.model or 'the bundled model'}")
    run_server(load, settings, lambda url, client: _print_ready(url, client, settings))


@app.command()
@expand_options
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; -: read it from standard input.")],
    *,
    model: Model = None,
    engine: TerminalOptions,
    sampling: SamplingOptions,
) -> None:
    """Continue a text in the terminal, as it is generated."""
    with _loaded(model, engine, sampling) as (llm, params):
        ids = llm.tokenizer.encode(read_stdin() if prompt == "-" else prompt)
        _print_stream(llm.stream(ids, _within(llm, ids, params)), [])


@app.command()
@expand_options
def chat(
    *,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    engine: TerminalOptions,
    sampling: ChatSamplingOptions,
) -> None:
    """Converse in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation."""
    with _loaded(model, engine, sampling) as (llm, params):
        converse(llm, params, system)


def main() -> None:
    """Run the `jaxserve` command."""
    replace_unknown_characters()
    app()


# -- inside

Messages = list[dict[str, str]]


@contextlib.contextmanager
def _loaded(model: str | None, engine: Given, sampling: SamplingOptions) -> Iterator[tuple["LLM", "SamplingParams"]]:
    """An LLM for one answer at a time, closed at the end, and how to sample.

    It compiles what the first answer needs when it needs it: sooner than warming everything up.
    """
    from jaxserve.core.sampling import SamplingParams

    params = SamplingParams(**given(sampling))  # a mistake in it is told before anything is loaded
    _configure_logging("warning", access=False)
    with told_progress() as progress:
        from jaxserve.llm import LLM

        llm = LLM(model, **engine, max_num_seqs=1, warmup=False, progress=progress)
    with llm:
        _ = llm.tokenizer  # raises where the model has none
        yield llm, params


def _configure_logging(level: str, *, access: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("jaxserve").setLevel(level.upper())
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access else logging.WARNING)


def _print_ready(url: str, client: "EngineClient", settings: ServerSettings) -> None:
    """The ready line, and a command that works as it stands."""
    name = (settings.served_model_names or (client.info.name,))[0]
    body = json.dumps({"model": name, "prompt": _example_prompt(client), "max_tokens": 64, "temperature": 0})
    key = ' -H "authorization: Bearer $JAXSERVE_API_KEY"' if settings.api_keys else ""
    print(f"jaxserve is ready: {name} at {url} ({client.info.max_model_len} tokens of context)")
    print(f"curl {url}/v1/completions -H 'content-type: application/json'{key} -d '{body}'")
    print(f"dashboard: {url}/dashboard", flush=True)


def _example_prompt(client: "EngineClient") -> str | list[int]:
    try:
        _ = client.tokenizer
    except NoTokenizer:
        return [1, 2, 3]
    return "def fibonacci(n):"


def _print_stream(outputs: Generator["RequestOutput", None, None], pieces: list[str]) -> None:
    """Print an answer as it comes, and add its pieces to a list. An exception ends the request."""
    try:
        with contextlib.closing(outputs):
            for output in outputs:
                pieces.append(output.outputs[0].text)
                print(pieces[-1], end="", flush=True)
    finally:
        print()


def _answer(outputs: Generator["RequestOutput", None, None]) -> str:
    """Print an answer as it comes and return it; Ctrl-C ends it."""
    pieces: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        _print_stream(outputs, pieces)
    return "".join(pieces)


def _within(llm: "LLM", ids: Sequence[int], params: "SamplingParams") -> "SamplingParams":
    """Return `params` with no more tokens than the model's context has left after a prompt."""
    room = max(1, llm.max_model_len - len(ids))  # a prompt that leaves no room is refused by the engine
    return replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))


def converse(llm: "LLM", params: "SamplingParams", system: str | None) -> None:
    """Answer each line of standard input until it ends, with what was said before.

    The oldest turns are dropped when the context becomes too small. A line that cannot be answered is told and dropped.
    """
    head: Messages = [] if system is None else [{"role": "system", "content": system}]
    said: Messages = []
    for line in _lines():
        said.append({"role": "user", "content": line})
        try:
            ids, dropped = _fitting(llm, head, said, params)
            answer = _answer(llm.stream(ids, _within(llm, ids, params)))
        except RequestError as error:
            tell(str(error))
            said.pop()
            continue
        if dropped:
            said = said[2 * dropped :]
            console.print(f"(the context is full: {dropped} of the oldest turns were left out)", style="dim")
        said.append({"role": "assistant", "content": answer})


def _fitting(llm: "LLM", head: Messages, said: Messages, params: "SamplingParams") -> tuple[list[int], int]:
    """Return the prompt of a conversation, and how many of its oldest turns it leaves out for the answer's sake."""
    room = min(params.max_tokens or llm.max_model_len, llm.max_model_len // 4)
    for dropped in range(len(said) // 2 + 1):
        text = llm.tokenizer.apply_chat_template([*head, *said[2 * dropped :]])
        ids = llm.tokenizer.encode(text, add_special_tokens=False)  # the template has written them
        if len(ids) + room <= llm.max_model_len:
            break
    return ids, dropped


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that say something."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


if __name__ == "__main__":
    main()
