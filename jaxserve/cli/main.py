"""The command line: the commands `serve`, `generate` and `chat`, and the root that gathers all commands."""

import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve._version import __version__
from jaxserve.cli.app import App, Root
from jaxserve.cli.bench import app as bench
from jaxserve.cli.models import app as models, pull
from jaxserve.cli.options import (
    IN_TERMINAL,
    MODEL,
    ChatSamplingOptions,
    Given,
    OptionsOf,
    SamplingOptions,
    expand_options,
)
from jaxserve.cli.plan import app as plan
from jaxserve.cli.profile import profile
from jaxserve.cli.quantize import quantize
from jaxserve.cli.run_batch import run_batch
from jaxserve.cli.sim import app as simulation
from jaxserve.cli.streams import end_on_write_errors, forgive_write_errors, open_closed_streams, read_texts_as_utf8
from jaxserve.cli.terminal import (
    configure_logging,
    print_error,
    print_notice,
    read_stdin,
    repeat_lost_interrupts,
    replace_unknown_characters,
)
from jaxserve.console.bars import console
from jaxserve.console.progress import start_progress
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, NoTokenizer, RequestError
from jaxserve.core.options import given_options, options_of
from jaxserve.core.progress import ignore_progress
from jaxserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from jaxserve.core.request import RequestOutput
    from jaxserve.core.sampling import SamplingParams
    from jaxserve.engine.client import EngineClient
    from jaxserve.llm import LLM

# The commands import slow modules when they run, so that --help is fast.

app = App(name="jaxserve", help="LLM serving on JAX/XLA.", cls=Root)
logger = logging.getLogger("jaxserve")
KEYS = ("JAXSERVE_API_KEY", "JAXSERVE_ADMIN_KEY")  # environment variables
FOREIGN = ("VLLM_", "SGLANG_", "LLAMA_ARG_", "OLLAMA_")  # beginnings of variables that other servers read
ENGINE_FIELDS = tuple(field.name for field in options_of(EngineConfig))
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
        Path | None, typer.Option(help="YAML file with any of these options, or the name of a file in configs/serve.")
    ] = None,
    engine: Annotated[Given, OptionsOf(EngineConfig, [name for name in ENGINE_FIELDS if name != "model"])],
    server: Annotated[Given, OptionsOf(ServerSettings)],
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    from jaxserve.server.logs import configure_logs
    from jaxserve.server.options import read_config, resolve
    from jaxserve.server.runner import run_server

    forgive_write_errors("stdout")  # a server goes on when nobody can read what it prints
    for name in KEYS:
        if os.environ.get(name) == "":
            raise ConfigError(f"{name} is empty: unset it to serve without a key")
    if foreign := sorted(name for name in os.environ if name.startswith(FOREIGN)):
        print_notice(f"{', '.join(foreign)}: not read; see jaxserve serve --help, and {KEYS[0]}")
    chosen = engine | server | ({} if model is None else {"model": model})
    engine_config, settings = resolve(read_config(config) if config else {}, chosen)
    configure_logging(settings.log_level)
    configure_logs(settings)
    in_json = settings.log_format == "json"

    def load() -> "EngineClient":
        from jaxserve.build import async_engine, build
        from jaxserve.checkpoint.local import with_local_files
        from jaxserve.engine.model_tokenizer import check_serves_text
        from jaxserve.preparation import prepare_in_background

        with contextlib.nullcontext(ignore_progress) if in_json else start_progress() as progress:
            local = with_local_files(engine_config, progress)
            check_serves_text(local)
            built = build(local, controlled=True, progress=progress)
        client = async_engine(built)
        prepare_in_background(built, client)
        return client

    (logger.info if in_json else console.print)(
        f"jaxserve {__version__}: loading {engine_config.model or 'the bundled model'}"
    )
    run_server(load, settings, lambda urls, client: _print_ready(urls, client, settings))


@app.command()
@expand_options
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue. -: read it from standard input.")],
    *,
    model: Model = None,
    engine: TerminalOptions,
    sampling: SamplingOptions,
) -> None:
    """Continue a text, and print the answer as it is generated."""
    with _open_llm(model, engine, sampling) as (llm, params):
        ids = llm.tokenizer.encode(read_stdin() if prompt == "-" else prompt)
        _print_stream(llm.stream(ids, _fit_max_tokens(llm, ids, params)), [])


@app.command()
@expand_options
def chat(
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    *,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    engine: TerminalOptions,
    sampling: ChatSamplingOptions,
) -> None:
    """Chat with a model in the terminal. Ctrl-C ends an answer, Ctrl-D ends the conversation."""
    with _open_llm(model, engine, sampling) as (llm, params):
        converse(llm, params, system)


app.command(name="run-batch")(run_batch)
app.command()(profile)
app.command()(quantize)
app.command()(pull)
app.add_typer(models)
app.add_typer(plan)
app.add_typer(bench)
app.add_typer(simulation)


def main() -> None:
    """Run the `jaxserve` command."""
    open_closed_streams()
    replace_unknown_characters()
    forgive_write_errors("stderr")
    end_on_write_errors()
    repeat_lost_interrupts()
    try:
        read_texts_as_utf8(KEYS)
        try:
            app(prog_name="jaxserve")
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        print_error(str(error))
        sys.exit(1)


# -- helpers

Messages = list[dict[str, str]]


@contextlib.contextmanager
def _open_llm(model: str | None, engine: Given, sampling: SamplingOptions) -> Iterator[tuple["LLM", "SamplingParams"]]:
    """Yield an LLM for one answer at a time and its sampling parameters, and close it at the end.

    What is not given on the command line is as in the server: the model's own defaults. Programs are compiled when an
    answer first needs them, so the first answer comes sooner than after a warm-up.
    """
    from jaxserve.core.sampling import SamplingParams

    chosen = given_options(sampling)
    SamplingParams(**chosen)  # raises before the model is loaded
    configure_logging("warning")
    with start_progress() as progress:
        from jaxserve.llm import LLM

        llm = LLM(model, **engine, max_num_seqs=1, warmup=False, progress=progress)
    with llm:
        _ = llm.tokenizer  # raises if the model has none
        yield llm, replace(llm.get_default_sampling_params(), **chosen)


def _print_ready(urls: Sequence[str], client: "EngineClient", settings: ServerSettings) -> None:
    """Print that the server is ready, where, and a `curl` command to try it with."""
    name = (settings.served_model_names or (client.info.name,))[0]
    ready = f"jaxserve is ready: {name} at {' and '.join(urls)} ({client.info.max_model_len} tokens of context)"
    defaults = f"defaults of requests (--generation-config): {_sampling_defaults(client)}"
    if settings.log_format == "json":
        logger.info(ready)
        logger.info(defaults)
        return
    curl, url = _curl(urls[0], settings)
    body = json.dumps({"model": name, "prompt": _example_prompt(client), "max_tokens": 64, "temperature": 0})
    key = ' -H "authorization: Bearer $JAXSERVE_API_KEY"' if settings.api_keys else ""
    print(ready)
    print(f"{curl} {url}/v1/completions -H 'content-type: application/json'{key} -d '{body}'", flush=True)
    print(defaults)
    if settings.template_defaults:
        print(f"defaults of the chat template: {json.dumps(dict(settings.template_defaults), ensure_ascii=False)}")
    if settings.uds is None:
        print(f"chat: {url}/", f"dashboard: {url}/dashboard", sep="\n", flush=True)


def _sampling_defaults(client: "EngineClient") -> str:
    """Return the sampling parameters of requests that give none, and the limit on answers, in words."""
    limit = {} if client.info.max_new_tokens is None else {"at most max_new_tokens": client.info.max_new_tokens}
    shown = {**client.info.default_sampling, **limit}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or "those of the API"


def _curl(address: str, settings: ServerSettings) -> tuple[str, str]:
    """Return the command that reaches an address from this machine, and the URL for it.

    Certificates rarely hold a loopback address, so that curl must not check them there.
    """
    if settings.uds is not None:
        return f"curl --unix-socket {shlex.quote(address.removeprefix('unix:'))}", "http://localhost"
    own = " --cert CERTIFICATE_AND_KEY" if settings.ssl_cert_reqs == 2 else ""
    return ("curl" if settings.ssl_certfile is None else f"curl --insecure{own}"), address


def _example_prompt(client: "EngineClient") -> str | list[int]:
    try:
        _ = client.tokenizer
    except NoTokenizer:
        return [1, 2, 3]
    return "def fibonacci(n):"


def _print_stream(outputs: Generator["RequestOutput", None, None], pieces: list[str]) -> None:
    """Print an answer as it is generated, and append its pieces to a list. An exception ends the request."""
    try:
        with contextlib.closing(outputs):
            for output in outputs:
                pieces.append(output.outputs[0].text)
                print(pieces[-1], end="", flush=True)
    finally:
        print()


def _print_answer(outputs: Generator["RequestOutput", None, None]) -> str:
    """Print an answer as it is generated, and return it. Ctrl-C ends it."""
    pieces: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        _print_stream(outputs, pieces)
    return "".join(pieces)


def _fit_max_tokens(llm: "LLM", ids: Sequence[int], params: "SamplingParams") -> "SamplingParams":
    """Return `params` with `max_tokens` limited to the room that the context has after a prompt."""
    room = max(1, llm.max_model_len - len(ids))  # the engine refuses a prompt that leaves no room
    return replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))


def converse(llm: "LLM", params: "SamplingParams", system: str | None) -> None:
    """Answer each line of standard input as the next turn of a conversation.

    The oldest turns are dropped when the context is full. A line that cannot be answered is reported and dropped.
    """
    system_messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    turns: Messages = []
    for line in _input_lines():
        turns.append({"role": "user", "content": line})
        try:
            ids, dropped = _fit_conversation(llm, system_messages, turns, params)
            answer = _print_answer(llm.stream(ids, _fit_max_tokens(llm, ids, params)))
        except RequestError as error:
            print_error(str(error))
            turns.pop()
            continue
        if dropped:
            turns = turns[2 * dropped :]
            console.print(f"(the context is full: {dropped} of the oldest turns were left out)", style="dim")
        turns.append({"role": "assistant", "content": answer})


def _fit_conversation(
    llm: "LLM", system_messages: Messages, turns: Messages, params: "SamplingParams"
) -> tuple[list[int], int]:
    """Return a conversation's prompt, and the number of oldest turns left out to make room for the answer."""
    room = min(params.max_tokens or llm.max_model_len, llm.max_model_len // 4)
    for dropped in range(len(turns) // 2 + 1):
        text = llm.tokenizer.conversation_text([*system_messages, *turns[2 * dropped :]])
        ids = llm.tokenizer.encode(text, add_special_tokens=False)  # the template writes the special tokens
        if len(ids) + room <= llm.max_model_len:
            break
    return ids, dropped


def _input_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank. There are none if it is closed."""
    while sys.stdin is not None:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


if __name__ == "__main__":
    main()
