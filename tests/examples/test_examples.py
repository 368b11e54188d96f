"""The examples run from top to bottom as they stand."""

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

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, README = ROOT / "examples", ROOT / "README.md"


def test_quickstart_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path))  # no traces in the home directory
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept in the repository"
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    answers = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "stream"
    ]
    assert any("def read_lines(path):" in output.text for output in answers)


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
