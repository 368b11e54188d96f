"""The documentation names everything that exists, and nothing else."""

import json
import re
import shlex
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest
import typer

from jaxserve import LLM, SamplingParams
from jaxserve.cli.main import app
from jaxserve.core.vllm_options import COMMAND_LINE
from jaxserve.parsing.registry import REASONING_PARSERS, TOOL_PARSERS
from jaxserve.server.schemas import harmless, unsupported
from jaxserve.telemetry import EngineMetrics, HttpFigures

ROOT = Path(__file__).resolve().parents[2]
SERVER = (ROOT / "docs" / "server.md").read_text()
BENCHMARKING = (ROOT / "docs" / "benchmarking.md").read_text()
LIBRARY = (ROOT / "docs" / "library.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "bench").glob("*.md"))]

SOURCES = ("jaxserve", "pallas_kernels", "bench", "tests", "scripts", "checkpoints", "examples")


def section(text: str, heading: str) -> str:
    """Return the text under a heading of the second level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def names_in_table(text: str) -> set[str]:
    """Return the code in a table's first column, without values of options and labels of metrics."""
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    code = [word for row in rows for word in re.findall(r"`([^`]+)`", row)]
    return {re.sub(r"\{.*", "", word) for word in code}


def bare(option: str) -> str:
    """Return an option's name without `--` and `--no-`."""
    return option.removeprefix("--").removeprefix("no-")


def test_benchmarking_manual_names_existing_options_and_every_command():
    bench = typer.main.get_command(app).commands["bench"].commands
    known = {name for command in bench.values() for parameter in command.params for name in parameter.opts}
    known |= {name for command in bench.values() for parameter in command.params for name in parameter.secondary_opts}
    known |= {name for parameter in typer.main.get_command(app).commands["serve"].params for name in parameter.opts}
    assert set(re.findall(r"(?<!\w)--[a-z][a-z-]+", BENCHMARKING)) <= known
    assert names_in_table(BENCHMARKING.split("\n## ")[0]) == set(bench)


def test_benchmarking_manuals_examples_parse():
    lines = re.findall(r"^jaxserve bench (.*)$", BENCHMARKING.replace("\\\n", ""), re.MULTILINE)
    bench = typer.main.get_command(app).commands["bench"]
    for line in lines:
        name, *args = shlex.split(line, comments=True)
        bench.commands[name].make_context(name, args)
    assert len(lines) > 5


def test_quantization_manual_names_every_option():
    quantize = typer.main.get_command(app).commands["quantize"]
    known = {name for parameter in quantize.params for name in parameter.opts if name.startswith("--")}
    text = (ROOT / "docs" / "quantization.md").read_text()
    documented = {name.split()[0] for name in names_in_table(section(text, "Preparing variants"))}
    assert {name for name in documented if name.startswith("--")} == known


def test_page_of_parsers_names_every_parser():
    page = (ROOT / "docs" / "parsers.md").read_text()
    assert names_in_table(section(page, "Tool calls")) == set(TOOL_PARSERS)
    assert names_in_table(section(page, "Reasoning")) == set(REASONING_PARSERS)


def test_server_manual_names_every_metric():
    exported = set(re.findall(r"# TYPE jaxserve_(\w+)", EngineMetrics("model").render(HttpFigures({}, {})).decode()))
    assert names_in_table(section(SERVER, "Metrics")) == exported


def test_server_manual_lists_every_field_that_is_ignored():
    rows = [
        line.strip("| ").split(" | ") for line in SERVER.split("### Ignored fields")[1].split("\n## ")[0].splitlines()
    ]
    documented = {row[0]: set(re.findall(r"`([^`]+)`", row[1])) for row in rows if len(row) == 2 and "`" in row[1]}
    assert documented == {reason: set(names) for reason, names in harmless.HARMLESS_BY_REASON.items()} | {
        "a body of `/v1/messages`": harmless.HARMLESS_IN_MESSAGES_API - harmless.HARMLESS,
        "a message": harmless.HARMLESS_IN_MESSAGES,
        "a text part": harmless.HARMLESS_IN_PARTS,
        "`stream_options`": harmless.HARMLESS_IN_STREAM_OPTIONS,
        "`output_config`": harmless.HARMLESS_IN_OUTPUT_CONFIG,
    }


def test_documented_values_without_effect_are_the_accepted_ones():
    table = SERVER.split("### Values without effect")[1].split("\nThe other")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    documented = {
        name: [json.loads(value) for value in re.findall(r"`([^`]+)`", values)]
        for names, values in rows
        for name in re.findall(r"`([^`]+)`", names)
    }
    assert documented == {name: list(values) for name, values in unsupported.NEUTRAL.items() if values}


def test_library_manual_names_every_sampling_parameter():
    documented = names_in_table(section(LIBRARY, "SamplingParams"))
    assert documented == {field.name for field in fields(SamplingParams)}


def test_library_manual_names_methods_that_exist():
    bullets = [line.partition(" -> ")[0] for line in section(LIBRARY, "Methods").splitlines() if line.startswith("- `")]
    named = {name for bullet in bullets for name in re.findall(r"`(\w+)\(", bullet)}
    assert {"generate", "chat", "stream", "stream_chat", "embed"} <= named
    assert all(callable(getattr(LLM, name, None)) for name in named)


def test_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - set(re.findall(r"\]\(([\w-]+\.md)", index)) == {
        "README.md"
    }


def test_structure_page_names_every_package():
    packages = {path.name for path in (ROOT / "jaxserve").iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    text = section((ROOT / "docs" / "structure.md").read_text(), "Packages")
    assert {name.removesuffix("/") for name in names_in_table(text) if name.endswith("/")} == packages


def test_structure_page_names_every_module():
    table = section((ROOT / "docs" / "structure.md").read_text(), "Modules")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    named = {(row[0].strip("| `"), name) for row in rows for name in re.findall(r"`([\w/]+\.py)`", row[1])}
    package = ROOT / "jaxserve"
    paths = [path.relative_to(package) for path in package.rglob("*.py") if not path.name.startswith("__")]
    existing = {
        (path.parts[0], "/".join(path.parts[1:])) if path.parts[1:] else ("jaxserve", path.name) for path in paths
    }
    assert named == existing


def known_options(command: click.Command) -> set[str]:
    """Return the options of a command and of its subcommands."""
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return known.union(*map(known_options, getattr(command, "commands", {}).values()))


# Options of other programs: hf download, rsync, curl, pip, and of other engines.
FOREIGN_OPTIONS = {
    *(f"--{name.replace('_', '-')}" for name in (*COMMAND_LINE, "no_enable_prefix_caching")),
    "--local-dir",
    "--unix-socket",
    "--inplace",
    "--no-deps",
    # docker, kubectl, install, systemctl
    *("--file", "--target", "--tag", "--publish", "--volume", "--gpus", "--user", "--read-only", "--tmpfs", "--env"),
    *("--from-literal", "--kustomize", "--mode", "--now"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_existing_options(page: Path):
    known = known_options(typer.main.get_command(app)) | FOREIGN_OPTIONS | {"--help"}
    scripts = [*(ROOT / "bench").rglob("*.py"), *(ROOT / "checkpoints").rglob("*.py")]
    scripts += (ROOT / "jaxserve").rglob("__main__.py")
    known |= {name for script in scripts for name in re.findall(r'"(--[a-z][a-z0-9-]+)"', script.read_text())}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text())) <= known


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "bench"], ids=lambda page: page.name)
def test_pages_command_lines_parse(page: Path):
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines() if "[options]" not in line]
    for part in (part.strip() for line in lines for part in line.partition(" >")[0].split("&&")):
        if part.startswith("jaxserve "):
            args = shlex.split(part, comments=True)[1:]
            command = typer.main.get_command(app)
            while args and args[0] in getattr(command, "commands", {}):
                command = command.commands[args.pop(0)]
            command.make_context(command.name, args)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_existing_files_of_the_code(page: Path):
    files = [path.as_posix() for folder in SOURCES for path in (ROOT / folder).rglob("*.*")]
    named = re.findall(r"`((?:[\w-]+/)*[\w*-]+\.(?:py|cc|h|txtpb))`", page.read_text())
    assert not [name for name in named if not any(fnmatch(file, f"*/{name}") for file in files)]


@pytest.mark.parametrize("name", ["structure.md", "adaptation.md", "simulator.md", "library.md"])
def test_pages_name_existing_classes_and_their_attributes(name: str):
    source = "\n".join(path.read_text() for path in (ROOT / "jaxserve").rglob("*.py"))
    defined = set(re.findall(r"(?:^|\s)(?:class|def) (\w+)|^ *(\w+): ", source, re.MULTILINE))
    known = {word for found in defined for word in found}
    page = (ROOT / "docs" / name).read_text()
    named = re.findall(r"`([A-Z][a-z]\w*[A-Z]\w*|[A-Z]\w*\.\w+)(?:\([^`]*\))?`", page)
    assert {word for dotted in named for word in dotted.split(".")} - known <= {"False", "True"}


def anchors(page: Path) -> set[str]:
    """Return the fragments that a link to a page in Markdown may have."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {heading.replace(" ", "-") for heading in headings} | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_existing_files_and_headings(page: Path):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert targets or page.name != "README.md"
    for target in targets:
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not fragment or fragment in anchors(file), f"{page.name} links to {target}"
