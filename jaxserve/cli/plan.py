"""The commands of `jaxserve plan`, which show and change the plan of a running server."""

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxserve.cli.app import App
from jaxserve.cli.terminal import read_stdin
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import read_text

if TYPE_CHECKING:
    from jaxserve.cli.plan_client import PlanClient

app = App(
    name="plan",
    help="Show and change the plan of a running server: its instances, layer precisions and KV pages.",
)
Url = Annotated[str, typer.Option(help="Address of the server; unix:PATH for a Unix socket.", envvar="JAXSERVE_URL")]
AdminKey = Annotated[
    str | None,
    typer.Option(help="The server's admin key, if it has one.", envvar="JAXSERVE_ADMIN_KEY", show_default=False),
]
DEFAULT_URL = "http://127.0.0.1:8000"
Names = Annotated[list[str], typer.Argument(metavar="INSTANCE...", help="Names of instances, as in `plan show`.")]
Wait = Annotated[bool, typer.Option(help="Wait until the instances have changed, and print the outcome.")]


@app.command()
def show(
    *,
    form: Annotated[
        Literal["table", "yaml", "json"],
        typer.Option("--format", help="Output format; `plan set` reads yaml and json."),
    ] = "table",
    decisions: Annotated[int, typer.Option(help="Number of decisions to show below the table.", min=0, max=1000)] = 5,
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
        console = Console(highlight=False)
        # In a file or pipe, lines are as long as they are.
        console.print(overview(client.status(), client.plan("yaml"), latest), soft_wrap=not console.is_terminal)


@app.command(name="set")
def change(
    file: Annotated[
        Path | None,
        typer.Argument(help="Plan in YAML or JSON, as printed by `plan show --format yaml`. -: standard input."),
    ] = None,
    *,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy that decides from now on: a built-in name, a YAML file with settings, which is read here, or "
            "the FILE.py:NAME that the server was started with.",
            show_default=False,
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Change a running server to a plan of your own, or to another policy or other settings."""
    if (file is None) == (policy is None):
        raise ConfigError("give either a FILE with a plan or --policy NAME")
    text = None if file is None else _read(file)
    body = None if policy is None else _policy(policy)
    with _client(url, admin_key) as client:
        now = client.set_policy(body) if body is not None else client.set_plan(str(text))
    typer.echo(f"accepted: from plan {now['plan_version']} on, the policy {now['policy']} decides")


@app.command()
def merge(instances: Names, *, wait: Wait = True, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Merge instances into one on all of their devices, which holds longer requests. Requests go on."""
    _edit({"action": "merge", "instances": instances}, wait, url, admin_key)


@app.command()
def split(
    instance: Annotated[str, typer.Argument(help="Name of the instance, as in `plan show`.")],
    *,
    into: Annotated[int, typer.Option(help="Number of instances that it becomes.", min=2)] = 2,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Split an instance into several, each on a part of its devices. Requests go on."""
    _edit({"action": "split", "instances": [instance], "into": into}, wait, url, admin_key)


@app.command()
def drop(instances: Names, *, wait: Wait = True, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Let instances keep one copy of their layers together, for more KV pages. Requests go on in a pipeline."""
    _edit({"action": "drop", "instances": instances}, wait, url, admin_key)


@app.command()
def restore(
    instance: Annotated[str, typer.Argument(help="Name of the group, as in `plan show`.")],
    *,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Let the instances of a group have all layers again. Requests go on."""
    _edit({"action": "restore", "instances": [instance]}, wait, url, admin_key)


@app.command()
def add(
    *,
    devices: Annotated[
        str | None, typer.Option(help="Numbers of its devices, as in 2,3. Default: the first free ones.")
    ] = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Add an instance on devices that no other has, like those at the start of the server."""
    chosen = {} if devices is None else {"devices": _numbers(devices)}
    _edit({"action": "add", **chosen}, wait, url, admin_key)


@app.command()
def remove(instances: Names, *, wait: Wait = True, url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Remove instances, whose requests go on in others, and free their devices."""
    _edit({"action": "remove", "instances": instances}, wait, url, admin_key)


@app.command()
def drain(
    instances: Names,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Let the instances take new requests again.")] = False,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Send no new requests to instances, while others can take them."""
    _edit({"action": "undrain" if undo else "drain", "instances": instances}, wait, url, admin_key)


@app.command()
def watch(
    *,
    count: Annotated[
        int | None, typer.Option(help="Seconds to watch. Default: until Ctrl-C.", min=1, show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Follow the plan and the load live. Where the output is not a terminal, print one line a second."""
    from rich.console import Console
    from rich.live import Live

    from jaxserve.cli.plan_view import LiveView

    console = Console(highlight=False)
    with contextlib.suppress(KeyboardInterrupt), _client(url, admin_key) as client:
        view = LiveView()
        events = itertools.islice(client.events(), count)
        if not console.is_terminal:
            for event in events:
                typer.echo(view.update(event).line())
            return
        with Live(console=console, auto_refresh=False) as live:
            for event in events:
                live.update(view.update(event).render(), refresh=True)


# -- helpers


def _client(url: str, admin_key: str | None) -> "PlanClient":
    from jaxserve.cli.plan_client import PlanClient

    return PlanClient(url, admin_key)


def _edit(body: dict[str, Any], wait: bool, url: str, admin_key: str | None) -> None:
    """Ask for a change of the instances, and wait for its outcome unless that is not wanted."""
    from jaxserve.cli.plan_wait import PlanWait
    from jaxserve.control.plan_edits import INTO, PlanEdit

    devices = tuple(body["devices"]) if "devices" in body else None
    edit = PlanEdit(body["action"], tuple(body.get("instances", ())), body.get("into", INTO), devices)
    with _client(url, admin_key) as client:
        answer = client.edit_plan(body)
        typer.echo(f"accepted: from plan {answer['status']['plan_version']} on, the policy manual decides")
        if wait:
            typer.echo(PlanWait(client, edit, answer, typer.echo).outcome())


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"invalid devices {text!r}: give numbers with commas in between, as in 2,3") from None


def _policy(source: str) -> dict[str, Any]:
    """Return the request for a policy: a YAML file's contents, or just the name."""
    from jaxserve.control.policies.loading import YAML_SUFFIXES, read_policy_file

    return read_policy_file(Path(source)) if source.endswith(YAML_SUFFIXES) else {"policy": source}


def _read(file: Path) -> str:
    return read_stdin() if str(file) == "-" else read_text(file)
