"""The contents of a wheel, built from the source distribution and run without the repository."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from jaxserve.kernels.native import build

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("jaxserve", "pallas_kernels", "configs", "checkpoints")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
PATIENCE = 300  # seconds
SMALL = "--memory-gb 1 --max-num-seqs 2 --max-model-len 256"


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


def built(kind: str, folder: Path) -> Path:
    """Build a source distribution or a wheel of a folder, without the native library, and return its path."""
    out = folder / "dist"
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run([sys.executable, "-c", code], folder, CXX="no-such-compiler", PYTHONPATH="")
    return next(path for path in out.iterdir() if path.suffix == {"sdist": ".gz", "wheel": ".whl"}[kind])


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with what a wheel installs, and with the native library of this checkout."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    with tarfile.open(built("sdist", source)) as archive:
        archive.extractall(source / "unpacked", filter="data")
    (unpacked,) = (source / "unpacked").iterdir()
    with zipfile.ZipFile(built("wheel", unpacked)) as wheel:
        wheel.extractall(site)
    if library := build.built(build.HERE):
        shutil.copy(library, site / "jaxserve" / "kernels" / "native")
    return site


@pytest.fixture
def jaxserve(installed, tmp_path):
    """Run a command line of the installed `jaxserve` in an empty folder, and return what it printed."""

    def call(line: str) -> str:
        command = [sys.executable, "-m", "jaxserve", *shlex.split(line)]
        return run(command, tmp_path, PYTHONPATH=str(installed), XDG_CACHE_HOME=str(tmp_path / "cache")).stdout

    return call


def first_command(manual: str, name: str) -> str:
    """Return the arguments of the first `jaxserve NAME` in a manual."""
    text = (ROOT / "docs" / manual).read_text().replace("\\\n", " ")
    return re.search(rf"^jaxserve ({name} .*?)(?:  +#.*)?$", text, re.MULTILINE)[1]


def test_wheel_has_every_configuration_and_no_source_of_the_model(installed):
    shipped = {path.relative_to(installed / "jaxserve").as_posix() for path in (installed / "jaxserve").rglob("*.*")}
    assert shipped >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.*")}
    assert "_bundled/jaxserve-python-6m/model.safetensors" in shipped
    assert not any("train" in name for name in shipped)


def test_make_installs_again_when_the_project_file_changes(tmp_path):
    """The console script must follow a new entry point."""
    for name in (*FILES, "Makefile", "scripts/make-venv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stamp = tmp_path / ".venv" / ".jaxserve"
    stamp.parent.mkdir()
    stamp.touch()
    command = ["make", "--dry-run", ".venv/.jaxserve"]
    assert "make-venv" not in run(command, tmp_path).stdout
    later = stamp.stat().st_mtime + 10
    os.utime(tmp_path / "pyproject.toml", (later, later))
    assert "make-venv" in run(command, tmp_path).stdout


def test_installed_command_line_starts(jaxserve):
    assert jaxserve("--version").startswith("jaxserve ")
    assert "serve" in jaxserve("--help")


def test_first_example_of_the_simulator_runs_from_a_wheel(jaxserve, tmp_path):
    assert "Mean TTFT" in jaxserve(first_command("simulator.md", "sim"))
    assert (tmp_path / "morph.json").is_file()


def test_first_examples_of_the_server_and_of_bench_run_from_a_wheel(jaxserve, tmp_path):
    config = first_command("server.md", "serve --config").removeprefix("serve ")
    load = first_command("benchmarking.md", "bench serve").replace("--num-prompts 200", "--num-prompts 2")
    args = f"{config} {SMALL} --no-warmup"
    jaxserve(f"{load} --input-len 8 --output-len 4 --serve-args {shlex.quote(args)} --save-result results/a.json")
    report = first_command("benchmarking.md", "bench report").replace("results/*.json", "results/a.json")
    assert "report.html" in jaxserve(report)
    assert (tmp_path / "report.html").is_file()
