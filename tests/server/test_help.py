"""`--help`: nothing is cut in a narrow terminal, the first options come first, and all can be found."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from jaxserve.cli.help import ALL, TOPIC, help_text
from jaxserve.cli.main import app

LONG = ("serve", "run-batch", "generate", "chat", "sim", "bench serve", "bench trace", "bench throughput")


def commands(command, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield every command and group with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}".strip())


COMMANDS = dict(commands(get_command(app)))


def help_of(path: str, option: str = "--help", columns: str = "80", status: int = 0) -> str:
    done = CliRunner().invoke(app, [*path.split(), option], prog_name="jaxserve", env={"COLUMNS": columns})
    assert done.exit_code == status, done.output
    return done.output


def names_of(command) -> set[str]:
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def shown_in(text: str) -> set[str]:
    """Return the names of the options that have an entry of their own."""
    lines = [line for line in text.splitlines() if re.match(r"  (  )?-", line)]
    return {name for line in lines for name in re.findall(r"(?<!\S)--?[a-z][a-z0-9-]*", line)}


@pytest.mark.parametrize("columns", [60, 80])
def test_nothing_is_cut_or_longer_than_the_terminal(columns: int, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for path, command in COMMANDS.items():
        context = command.context_class(command, info_name=f"jaxserve {path}".strip())
        context.meta[TOPIC] = ALL
        text = help_text(command, context)
        assert max(map(len, text.splitlines())) <= columns, path
        assert names_of(command) <= shown_in(text), path
        words = " ".join(text.split())
        for option in command.params:
            assert " ".join((option.help or "").split()) in words, (path, option.name)
        assert "…" not in text


@pytest.mark.parametrize("path", LONG)
def test_long_help_shows_first_what_is_needed_first(path: str):
    first, every = help_of(path), help_of(path, "--help=all")
    assert len(shown_in(first)) < len(shown_in(every))
    assert len(first.splitlines()) <= 110
    assert f"jaxserve {path} --help=all shows all of them" in " ".join(first.split())
    assert "needed first" not in every


def test_help_of_serve_begins_with_twenty_options():
    text = help_of("serve")
    assert "These are the 20 options that are needed first" in text
    assert {"--port", "--memory-gb", "--tp", "--api-key", "--policy", "--max-model-len"} <= shown_in(text)
    assert "--keep-alive-timeout" not in text


@pytest.mark.parametrize(
    ("path", "word", "expected", "absent"),
    [
        ("serve", "kv-pages", {"--kv-pages", "--max-kv-pages"}, {"--host"}),  # names
        ("serve", "Scheduling", {"--max-num-seqs", "--overlap"}, {"--host"}),  # a group
        ("serve", "idle", {"--keep-alive-timeout", "--prepare"}, {"--tp"}),  # a word of the texts
        ("serve", "tensor-parallel-size", {"--tp"}, {"--host"}),  # a name of vLLM
        ("bench serve", "rate", {"--request-rate"}, {"--base-url"}),
        ("plan watch", "admin", {"--admin-key"}, {"--count"}),
    ],
)
def test_word_finds_names_texts_groups_and_names_of_vllm(path, word, expected, absent):
    shown = shown_in(help_of(path, f"--help={word}"))
    assert expected <= shown
    assert not absent & shown


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ngl", "--n-gpu-layers all layers are on the devices: use --tp or --pp for several"),  # a short name
        ("--ctx-size", "--ctx-size use --max-model-len, the tokens of one sequence"),
        ("cpu-offload", "--cpu-offload-gb, --cpu-offload-params weights stay on the device: use --precision"),
    ],
)
def test_word_finds_what_to_use_in_place_of_options_of_other_engines(word: str, expected: str):
    assert f"Options of other engines: {expected}" in " ".join(help_of("serve", f"--help={word}").split())


def test_empty_word_is_the_help_without_a_word():
    assert help_of("serve", "--help=") == help_of("serve")


def test_word_for_a_group_says_which_of_its_commands_have_such_options():
    text = help_of("", "--help=memory-gb")
    assert "jaxserve serve\n      --memory-gb" in text
    assert "jaxserve bench throughput" in text
    assert "jaxserve plan" not in text


@pytest.mark.parametrize("path", ["serve", "bench", ""])
def test_word_that_finds_nothing_is_an_error(path):
    assert "is about 'zebra'" in help_of(path, "--help=zebra", status=1)


def in_terminal(**environment: str) -> str:
    """Return what `jaxserve plan --help` prints in a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jaxserve", "plan", "--help"]
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")} | environment
    subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, env=given, timeout=120, check=True)
    os.close(theirs)
    text = b""
    with open(ours, "rb", buffering=0) as stream:
        try:
            while piece := stream.read(65536):
                text += piece
        except OSError:  # Linux reports the end of a terminal as an error
            pass
    return text.decode().replace("\r\n", "\n")


def test_only_a_terminal_gets_colours_unless_they_are_unwanted():
    plain = help_of("plan")
    assert "\x1b" not in plain
    assert in_terminal(NO_COLOR="1", COLUMNS="80") == plain
    coloured = in_terminal(COLUMNS="80")
    assert "\x1b[1m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_help_without_a_terminal_is_that_of_80_columns():
    command = [sys.executable, "-m", "jaxserve", "serve", "--help"]
    given = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=120, check=True)
    assert done.stdout == help_of("serve")


def test_help_loads_neither_jax_nor_the_server():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom jaxserve.cli.main import app\n"
        "assert CliRunner().invoke(app, ['serve', '--help=all']).exit_code == 0\n"
        "print([name for name in ('jax', 'fastapi', 'pydantic', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "'jax'" not in done.stdout
    assert "'fastapi'" not in done.stdout
    assert "'matplotlib'" not in done.stdout
