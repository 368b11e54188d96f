"""The examples run from top to bottom as they stand."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.server.process import server_process
from tests.support.thorough import THOROUGH

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, README = ROOT / "examples", ROOT / "README.md"


def test_quickstart_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run all cells, or without THOROUGH those that are not marked as long."""
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path))  # no traces in the home directory
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if THOROUGH or "long" not in cell.metadata.get("tags", ())]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = [output.text for output in outputs if output.output_type == "stream"]
    assert any("def read_lines(path):" in text for text in printed)
    assert any("rounding" in text and "int4" in text for text in printed), "what quantisation loses"
    if THOROUGH:
        assert any(text.startswith("done | ") for text in printed), "the policy has changed the plan"
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 1 + THOROUGH


def test_quickstart_notebook_shows_what_it_prints_and_no_path_of_a_machine():
    cells = [cell for cell in nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4).cells if "outputs" in cell]
    assert len([cell for cell in cells if cell.outputs]) >= len(cells) - 2, "closing an engine prints nothing"
    stored = json.dumps([cell.outputs for cell in cells])
    assert stored.count("image/png") == 2
    assert not re.search(r"/(home|tmp|root|work|Users)/", stored)
    assert '"error"' not in stored


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Serve the bundled model."""
    options = ("--port=0", "--max-num-seqs=2", "--max-num-batched-tokens=66")
    with server_process("-m", "jaxserve", "serve", *options) as server:
        yield server.url


def output_of(example: str, server: str) -> str:
    environment = {**os.environ, "JAXSERVE_URL": server}
    command = [sys.executable, str(EXAMPLES / example)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout


def test_openai_client_answers(server: str):
    assert output_of("openai_client.py", server)


def test_program_of_the_readme_answers(server: str, capsys: pytest.CaptureFixture):
    (program,) = re.findall(r"^```python\n(from openai .*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    address = "http://127.0.0.1:8000"
    assert address in program
    exec(compile(program.replace(address, server), "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_structured_extraction_returns_a_function_twice(server: str):
    output = output_of("structured_extraction.py", server)
    assert output.startswith("name=")
    assert re.search(r" has \d parameters\n$", output)


def test_agent_calls_its_tool_and_then_answers(server: str):
    call, _, answer = output_of("agent_loop.py", server).partition("\n")
    assert re.fullmatch(r'measure\(\{.*"width".*\}\) = \d+', call)
    assert answer.strip()
