"""The command line: `jaxserve serve`, `generate` and `chat`; `bench`, `plan`, `sim` and others have their own files."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxserve._version import __version__
from jaxserve.cli.bench import app as bench
from jaxserve.cli.flatten import flattened
from jaxserve.cli.options import ChatSamplingOptions, EngineOptions, SamplingOptions, given, option
from jaxserve.cli.plan import app as plan
from jaxserve.cli.profile import profile
from jaxserve.cli.quantize import app as quantization
from jaxserve.cli.sim import sim
from jaxserve.cli.terminal import console, told_errors, told_progress
from jaxserve.cli.vllm_spelling import VllmCommand
from jaxserve.core.errors import ConfigError, NoTokenizer

if TYPE_CHECKING:
    from jaxserve.core.request import RequestOutput
    from jaxserve.core.sampling import SamplingParams
    from jaxserve.engine.client import EngineClient
    from jaxserve.llm import LLM
    from jaxserve.server.settings import ServerSettings

# What is slow to import is imported by the commands, so that --help is fast.

app = typer.Typer(
    name="jaxserve",
    help="LLM serving on JAX/XLA.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench)
app.add_typer(plan)
app.add_typer(quantization)
app.command()(profile)
app.command(cls=VllmCommand)(sim)
API_KEY, ADMIN_KEY = "JAXSERVE_API_KEY", "JAXSERVE_ADMIN_KEY"  # environment variables
Model = Annotated[str | None, option("Model", "Folder in Hugging Face layout; default: the bundled model.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False) -> None:
    if version:
        print(f"jaxserve {__version__}")
        raise typer.Exit


@app.command()
@flattened
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder in Hugging Face layout; default: the bundled model.")
    ] = None,
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these options.")] = None,
    engine: EngineOptions,
    variant: Annotated[
        list[str] | None,
        option(
            "Adaptation", "Precision that layers may change to while serving, besides the policy's; may be repeated."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        option(
            "Adaptation", "What changes the plan: static, manual, morph, morph-int8, morph-performance, or a YAML file."
        ),
    ] = None,
    slo_ttft: Annotated[
        float | None, option("Adaptation", "Seconds to the first token that the policy keeps; default: its own.")
    ] = None,
    skip_tokenizer_init: Annotated[
        bool | None, option("Model", "Serve without a tokenizer: prompts are token ids; default: no.")
    ] = None,
    served_model_name: Annotated[list[str] | None, option("Model", "Name for clients; may be repeated.")] = None,
    page_size: Annotated[int | None, option("Memory", "Tokens of a KV page; default 16.")] = None,
    kv_pages: Annotated[int | None, option("Memory", "KV pages; default: what the budget holds.")] = None,
    max_kv_pages: Annotated[
        int | None, option("Memory", "KV pages to have room for; default: what layers can give with a policy.")
    ] = None,
    prefix_caching: Annotated[
        bool | None, option("Memory", "Keep the KV pages of prompts for later ones; default: yes.")
    ] = None,
    max_num_seqs: Annotated[int | None, option("Scheduling", "Sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, option("Scheduling", "Tokens of one step.")] = None,
    max_queued_requests: Annotated[int | None, option("Scheduling", "Waiting requests; beyond: 503.")] = None,
    max_queued_tokens: Annotated[int | None, option("Scheduling", "Waiting prompt tokens; beyond: 503.")] = None,
    dp: Annotated[int | None, option("Parallelism", "Data parallelism: copies of the model.")] = None,
    compile_cache: Annotated[
        Path | None, option("Compilation", "Folder; default: jaxserve/xla in the user's cache.")
    ] = None,
    warmup: Annotated[bool | None, option("Compilation", "Compile everything before serving; default: yes.")] = None,
    step_log: Annotated[Path | None, option("Records", "File for what each step was and took; default: none.")] = None,
    host: Annotated[str | None, option("HTTP server", "Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, option("HTTP server", "Default 8000; 0: any free port.")] = None,
    api_key: Annotated[
        list[str] | None,
        option("HTTP server", "Clients must send one of these; may be repeated.", envvar=API_KEY),
    ] = None,
    admin_key: Annotated[
        str | None,
        option("HTTP server", "Operators must send it to see or change the plan.", envvar=ADMIN_KEY),
    ] = None,
    cors_origin: Annotated[list[str] | None, option("HTTP server", "Web origin that may call.")] = None,
    root_path: Annotated[
        str | None, option("HTTP server", "Prefix of all paths, such as /llm, that a proxy keeps.")
    ] = None,
    keep_alive_timeout: Annotated[
        float | None, option("HTTP server", "Seconds that an idle connection stays open; default 120.")
    ] = None,
    sse_ping_interval: Annotated[
        float | None, option("HTTP server", "Seconds of silence before a stream sends a comment; default 15.")
    ] = None,
    shutdown_timeout: Annotated[
        float | None, option("HTTP server", "Seconds for requests in flight after SIGTERM; default 30.")
    ] = None,
    access_log: Annotated[bool | None, option("HTTP server", "Log paths and statuses; default: no.")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, option("HTTP server", "Default: info.")
    ] = None,
    max_body_mb: Annotated[float | None, option("Limits", "MiB of a request's body; default 32.")] = None,
    header_timeout: Annotated[
        float | None, option("Limits", "Seconds to receive the head of a request; default 30.")
    ] = None,
    body_timeout: Annotated[float | None, option("Limits", "Seconds to receive a body; default 60.")] = None,
    max_prompts: Annotated[int | None, option("Limits", "Prompts or inputs of one call; default 2048.")] = None,
    clamp_max_tokens: Annotated[
        bool | None, option("Limits", "Lower a max_tokens that does not fit instead of refusing it; default: no.")
    ] = None,
    max_n: Annotated[int | None, option("Limits", "Answers per prompt; default 64.")] = None,
    max_logprobs: Annotated[int | None, option("Limits", "Alternatives per token; default 20.")] = None,
    max_stop_strings: Annotated[int | None, option("Limits", "Stop strings per request; default 16.")] = None,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    options = {name: value for name, value in locals().items() if name not in ("config", "engine")} | given(engine)
    from jaxserve.server.options import read_config, resolve
    from jaxserve.server.runner import run_server

    with told_errors():
        for name in (API_KEY, ADMIN_KEY):
            if os.environ.get(name) == "":
                raise ConfigError(f"{name} is empty: unset it to serve without a key")
        engine_config, server = resolve(read_config(config) if config else {}, options)
        _configure_logging(server.log_level, access=server.access_log)

        def load() -> "EngineClient":
            from jaxserve.build import build_async_engine, check_serves_text

            check_serves_text(engine_config)
            with told_progress() as progress:
                return build_async_engine(engine_config, progress)

        console.print(f"jaxserve {__version__}: loading {engine_config.model or 'the bundled model'}")
        run_server(load, server, lambda url, client: _print_ready(url, client, server))


@app.command()
@flattened
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; -: read it from standard input.")],
    *,
    model: Model = None,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Continue a text in the terminal, as it is generated."""
    with told_errors(), _loaded(model, engine, sampling) as (llm, params):
        _print_stream(llm.stream(sys.stdin.read() if prompt == "-" else prompt, params))


@app.command()
@flattened
def chat(
    *,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    engine: EngineOptions,
    sampling: ChatSamplingOptions,
) -> None:
    """Converse in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation."""
    with told_errors(), _loaded(model, engine, sampling) as (llm, params):
        converse(lambda messages: llm.stream_chat(messages, params), system)


def main() -> None:
    """The entry point of the `jaxserve` command."""
    app()


# -- inside

Messages = list[dict[str, str]]


@contextlib.contextmanager
def _loaded(
    model: str | None, engine: EngineOptions, sampling: SamplingOptions
) -> Iterator[tuple["LLM", "SamplingParams"]]:
    """An LLM for one answer at a time, closed at the end, and how to sample.

    It compiles what the first answer needs when it needs it: sooner than warming everything up.
    """
    from jaxserve.core.sampling import SamplingParams

    params = SamplingParams(**given(sampling))  # a mistake in it is told before anything is loaded
    _configure_logging("warning", access=False)
    with told_progress() as progress:
        from jaxserve.llm import LLM

        llm = LLM(model, **given(engine), max_num_seqs=1, warmup=False, progress=progress)
    with llm:
        yield llm, params


def _configure_logging(level: str, *, access: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("jaxserve").setLevel(level.upper())
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access else logging.WARNING)


def _print_ready(url: str, client: "EngineClient", settings: "ServerSettings") -> None:
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


def _print_stream(outputs: Generator["RequestOutput", None, None]) -> str:
    """Prints an answer as it comes and returns it; Ctrl-C ends it."""
    pieces: list[str] = []
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(outputs):
        for output in outputs:
            pieces.append(output.outputs[0].text)
            print(pieces[-1], end="", flush=True)
    print()
    return "".join(pieces)


def converse(answer: Callable[[Messages], Generator["RequestOutput", None, None]], system: str | None) -> None:
    """Answers each line of standard input until it ends, with all that was said before."""
    messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if text.strip():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _print_stream(answer(messages))})


if __name__ == "__main__":
    main()
