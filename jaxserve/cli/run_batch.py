"""The command `jaxserve run-batch`, which imports its implementation only when it runs, so that --help is fast."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.bench.interrupts import signals_as_ctrl_c
from jaxserve.cli.options import MODEL, Given, OptionsOf, expand_options
from jaxserve.cli.terminal import configure_logging
from jaxserve.console.bars import console
from jaxserve.console.progress import progress_bar, start_progress
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import ensure_file
from jaxserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from jaxserve.engine.client import EngineClient
    from jaxserve.server.batch.files import Batch
    from jaxserve.server.batch.run import Progress

SERVER_FIELDS = (
    *("served_model_names", "max_body_mb", "max_prompts", "clamp_max_tokens"),
    *("default_chat_template_kwargs", "replace_unsupported"),
)


@expand_options
def run_batch(
    folder: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL)] = None,
    *,
    input_file: Annotated[
        Path,
        typer.Option(
            "--input-file", "-i", help="Requests in the format of OpenAI's batches, a line of JSON each. -: stdin."
        ),
    ],
    output_file: Annotated[
        Path,
        typer.Option(
            "--output-file", "-o", help="File for the answers; if it exists, the batch is continued. -: stdout."
        ),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output instead of continuing the batch.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with options, as for `jaxserve serve`.", show_default=False)
    ] = None,
    engine: Annotated[Given, OptionsOf(EngineConfig)],
    server: Annotated[Given, OptionsOf(ServerSettings, SERVER_FIELDS)],
) -> None:
    """Answer a file of requests without a server, and continue where an earlier run has ended."""
    from jaxserve.server.batch.files import is_stream, open_batch, readable_twice
    from jaxserve.server.batch.run import LINE_OVERHEAD_BYTES, Progress
    from jaxserve.server.options import read_config, resolve

    if folder is not None and "model" in engine:
        raise ConfigError(f"the model is given twice, as {folder} and with --model {engine['model']}")
    chosen = engine | server | ({} if folder is None else {"model": folder})
    engine_config, settings = resolve(read_config(config) if config else {}, chosen)
    settings = replace(settings, api_keys=())  # a file for `jaxserve serve` may have some, but there are no clients
    configure_logging("warning")
    if not is_stream(output_file):
        ensure_file(output_file, "--output-file")
    with signals_as_ctrl_c(), readable_twice(input_file) as source:
        batch = open_batch(source, output_file, settings.max_body_bytes + LINE_OVERHEAD_BYTES, overwrite=overwrite)
        progress = Progress(batch.total, earlier=batch.total - batch.remaining)
        try:
            if batch.remaining:
                _run(engine_config, settings, batch, progress)
        finally:
            console.print(_summary(progress, batch), markup=False, soft_wrap=True)
    if progress.failed:
        raise typer.Exit(1)


def _run(config: EngineConfig, settings: ServerSettings, batch: "Batch", progress: "Progress") -> None:
    """Load the model, and answer what is left of a batch."""
    from jaxserve.build import build_async_engine
    from jaxserve.checkpoint.local import with_local_files
    from jaxserve.engine.model_tokenizer import check_serves_text

    with start_progress() as show:
        config = with_local_files(config, show)
        check_serves_text(config)
        client = build_async_engine(config, show)
    with progress_bar("requests", progress.total, keep=False) as bar:

        def on_progress() -> None:
            failed = f" ({progress.failed} failed)" if progress.failed else ""
            bar.update(f"requests{failed}", progress.done, progress.total)

        asyncio.run(_answer(client, settings, batch, progress, on_progress))


async def _answer(
    client: "EngineClient",
    settings: ServerSettings,
    batch: "Batch",
    progress: "Progress",
    on_progress: Callable[[], None],
) -> None:
    from jaxserve.server.app import create_app
    from jaxserve.server.batch.run import run_batch

    try:
        await run_batch(create_app(client, settings), batch, progress, on_progress)
    finally:
        await client.shutdown()


def _summary(progress: "Progress", batch: "Batch") -> str:
    """Return what has become of a batch, and how to go on."""
    parts = [f"{progress.earlier + progress.answered} of {progress.total} requests answered"]
    if progress.earlier:
        parts[0] += f" ({progress.earlier} of them earlier)"
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if left := progress.total - progress.done:
        parts.append(f"{left} left")
    again = "; the same command tries again" if progress.failed else ""
    again = "; the same command continues" if left else again
    return f"{', '.join(parts)}: {batch.output}{again}"
