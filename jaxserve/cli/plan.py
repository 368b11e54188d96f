"""`jaxserve plan`: a running server's plan in a terminal. What the commands need is imported when they run."""

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxserve.cli.terminal import read_stdin
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import read_text

if TYPE_CHECKING:
    from jaxserve.cli.plan_client import PlanClient

app = typer.Typer(
    name="plan",
    help="See and change the plan of a running server: layer precisions, KV pages, and what led to them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Url = Annotated[str, typer.Option(help="Where the server listens.", envvar="JAXSERVE_URL")]
AdminKey = Annotated[
    str | None,
    typer.Option(help="The server's admin key, if it has one.", envvar="JAXSERVE_ADMIN_KEY", show_default=False),
]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def show(
    *,
    form: Annotated[
        Literal["table", "yaml", "json"], typer.Option("--format", help="yaml is what `plan set` takes.")
    ] = "table",
    decisions: Annotated[int, typer.Option(help="Latest decisions to show with the table.", min=0, max=1000)] = 5,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Show the plan in force, memory, and the latest decisions."""
    with _client(url, admin_key) as client:
        if form != "table":
            typer.echo(client.plan(form).rstrip())
            return
        from rich.console import Console

        from jaxserve.cli.plan_view import overview

        latest = client.decisions(decisions) if decisions else []
        Console(highlight=False).print(overview(client.status(), client.plan("yaml"), latest))


@app.command(name="set")
def change(
    file: Annotated[
        Path | None, typer.Argument(help="YAML or JSON as from `plan show --format yaml`; -: standard input.")
    ] = None,
    *,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Let this policy decide from now on: morph, static, or that of the server's start, named as then.",
            show_default=False,
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Have the server go over to a plan of yours, or to another policy, while it serves."""
    if (file is None) == (policy is None):
        raise ConfigError("say either a FILE with a plan, or --policy NAME")
    text = None if file is None else _read(file)
    with _client(url, admin_key) as client:
        now = client.set_policy(str(policy)) if text is None else client.set_plan(text)
    typer.echo(f"accepted: from plan {now['plan_version']} on, the policy {now['policy']} decides")


@app.command()
def watch(
    *,
    count: Annotated[
        int | None, typer.Option(help="Seconds to watch; default: until Ctrl-C.", min=1, show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Follow the plan and the load, live; a line a second where there is no terminal."""
    from rich.console import Console
    from rich.live import Live

    from jaxserve.cli.plan_view import Scene

    console = Console(highlight=False)
    with contextlib.suppress(KeyboardInterrupt), _client(url, admin_key) as client:
        scene = Scene()
        events = itertools.islice(client.events(), count)
        if not console.is_terminal:
            for event in events:
                typer.echo(scene.take(event).line())
            return
        with Live(console=console, auto_refresh=False) as live:
            for event in events:
                live.update(scene.take(event).picture(), refresh=True)


# -- inside


def _client(url: str, admin_key: str | None) -> "PlanClient":
    from jaxserve.cli.plan_client import PlanClient

    return PlanClient(url, admin_key)


def _read(file: Path) -> str:
    """Return a plan's text. Raises ConfigError for a file that cannot be read."""
    return read_stdin() if str(file) == "-" else read_text(file)
