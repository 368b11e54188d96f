"""The documentation names everything that exists, and nothing else."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from jaxserve import SamplingParams
from jaxserve.cli.main import app
from jaxserve.telemetry import EngineMetrics

ROOT = Path(__file__).resolve().parents[2]
SERVER = (ROOT / "docs" / "server.md").read_text()
BENCHMARKING = (ROOT / "docs" / "benchmarking.md").read_text()
LIBRARY = (ROOT / "docs" / "library.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "bench").glob("*.md"))]


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


def test_server_manual_names_every_metric():
    exported = set(re.findall(r"# TYPE jaxserve_(\w+)", EngineMetrics("model").render().decode()))
    assert names_in_table(section(SERVER, "Metrics")) == exported


def test_library_manual_names_every_sampling_parameter():
    documented = names_in_table(section(LIBRARY, "SamplingParams"))
    assert documented == {field.name for field in fields(SamplingParams)}


def test_structure_page_names_every_package():
    packages = {path.name for path in (ROOT / "jaxserve").iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    text = section((ROOT / "docs" / "structure.md").read_text(), "Packages")
    assert {name.removesuffix("/") for name in names_in_table(text) if name.endswith("/")} == packages


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
