"""Distributions of the package, and what they install: run in an environment of its own, without the repository."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from jaxserve.kernels.native import build

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("jaxserve", "pallas_kernels", "configs", "checkpoints", "docs", "examples", "deploy")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", *PAGES)
PATIENCE = 300  # seconds
SMALL = "--memory-gb 1 --max-num-seqs 2 --max-model-len 256"
# A compiler that succeeds and writes empty files.
COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then : > "$2"; fi
  shift
done
"""


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


def built(kind: str, folder: Path, **environment: str) -> Path:
    """Build a source distribution or a wheel of a folder, without a compiler if none is given, and return its path."""
    out = folder / "dist"
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    environment = {"CXX": "no-such-compiler", "PYTHONPATH": "", **environment}
    return out / run([sys.executable, "-c", code], folder, **environment).stdout.splitlines()[-1]


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source distribution of this checkout."""
    source = tmp_path_factory.mktemp("source")
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests")  # setuptools adds such files by itself
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    return built("sdist", source)


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    """The folder in the source distribution."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def wheel(unpacked) -> Path:
    """The wheel of the source distribution, made without a compiler."""
    return built("wheel", unpacked)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A fresh virtual environment into which pip has installed the wheel; its dependencies are those of this one.

    The native library of this checkout is put where a wheel with kernels has it.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).stdout.strip()
    )
    # Its packages can be imported, but its .pth files, as that of an editable jaxserve, have no effect.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)]
    run([sys.executable, "-m", "pip", "--python", str(python), *install], folder, PYTHONPATH="")
    if library := build.built(build.HERE):
        shutil.copy(library, site / "jaxserve" / "kernels" / "native")
    return folder


@pytest.fixture(scope="module")
def package(environment) -> Path:
    """The installed package's folder."""
    (folder,) = environment.glob("lib/python*/site-packages/jaxserve")
    return folder


@pytest.fixture
def jaxserve(environment, tmp_path):
    """Run a command line of the installed `jaxserve` in an empty folder, and return what it printed."""

    def call(line: str) -> str:
        command = [str(environment / "bin" / "jaxserve"), *shlex.split(line)]
        return run(command, tmp_path, PYTHONPATH="", XDG_CACHE_HOME=str(tmp_path / "cache")).stdout

    return call


def first_command(manual: str, name: str) -> str:
    """Return the arguments of the first `jaxserve NAME` in a manual."""
    text = (ROOT / "docs" / manual).read_text().replace("\\\n", " ")
    return re.search(rf"^jaxserve ({name} .*?)(?:  +#.*)?$", text, re.MULTILINE)[1]


def test_wheel_has_every_configuration_and_no_source_of_the_model(package):
    shipped = {path.relative_to(package).as_posix() for path in package.rglob("*.*")}
    assert shipped >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.*")}
    assert "_bundled/jaxserve-python-6m/model.safetensors" in shipped
    assert not any("train" in name for name in shipped)


def test_wheel_without_kernels_is_for_any_machine(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")


def test_wheel_with_kernels_is_for_this_kind_of_machine(unpacked, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    source = shutil.copytree(unpacked, tmp_path / "source", ignore=shutil.ignore_patterns("build", "dist"))
    wheel = built("wheel", source, CXX=str(compiler), JAXSERVE_BUILD_KERNELS="required")
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(".so"))
    assert re.fullmatch(rf"jaxserve/kernels/native/cpu-jaxlib[\d.]+-{platform.machine()}-\w+\.so", library)


@pytest.mark.parametrize(
    ("wanted", "reason"), [("required", "no-such-compiler"), ("yes", "choose from auto, required, no")]
)
def test_kernels_that_are_required_or_wanted_in_unknown_ways_stop_the_build(unpacked, wanted, reason):
    with pytest.raises(AssertionError, match=reason):
        built("wheel", unpacked, JAXSERVE_BUILD_KERNELS=wanted)


def test_source_distribution_has_neither_other_distributions_nor_libraries_nor_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert not [name for name in names if name.endswith((".whl", ".gz", ".zip", ".so"))]
    assert not [name for name in names if "/tests/" in name], "without all of them, none could run"


def test_distributions_can_be_published(sdist, wheel, tmp_path):
    checked = run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], tmp_path, NO_COLOR="1")
    assert checked.stdout.count("PASSED") == 2


def test_published_description_has_no_link_into_the_repository(wheel):
    description = metadata(wheel).get_payload()
    assert "make serve" in description
    targets = re.findall(r"\]\(([^)]+)\)", description)
    assert not [target for target in targets if not target.startswith(("https://", "http://"))]


def test_licences_are_those_of_the_code_and_of_the_bundled_model(wheel):
    found = metadata(wheel)
    assert found["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    assert set(found.get_all("License-File")) == {"LICENSE", "checkpoints/jaxserve-python-6m/LICENSE"}


def test_source_distribution_has_the_pages_and_examples(unpacked):
    wanted = {*PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))}
    wanted |= {"examples/quickstart.ipynb", "deploy/Dockerfile", "checkpoints/train/train.py"}
    assert not [name for name in sorted(wanted) if not (unpacked / name).is_file()]


def copy_makefile(folder: Path) -> None:
    """Copy the Makefile, and what its environment is made of."""
    for name in (*FILES, "Makefile", "scripts/make-venv"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def test_make_installs_again_when_the_project_file_changes(tmp_path):
    """The console script must follow a new entry point."""
    copy_makefile(tmp_path)
    stamp = tmp_path / ".venv" / ".jaxserve"
    stamp.parent.mkdir()
    stamp.touch()
    command = ["make", "--dry-run", ".venv/.jaxserve"]
    assert "make-venv" not in run(command, tmp_path).stdout
    later = stamp.stat().st_mtime + 10
    os.utime(tmp_path / "pyproject.toml", (later, later))
    assert "make-venv" in run(command, tmp_path).stdout


@pytest.mark.parametrize("target", ["bench", "demo", "demo-cluster", "bench-peers"])
def test_make_installs_what_its_target_needs(tmp_path, target):
    copy_makefile(tmp_path)
    assert "'.[bench]'" in run(["make", "--dry-run", target], tmp_path).stdout.replace('"', "'")


def test_type_checkers_find_an_editable_install_from_another_folder(unpacked, tmp_path):
    """They read .pth files that name a folder, and run no import hook."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built("editable", unpacked, JAXSERVE_BUILD_KERNELS="no")) as editable:
        editable.extractall(site)
    (tmp_path / "program.py").write_text("from jaxserve import SamplingParams\n")
    # Modules that are found are not read: the types of the whole library would take ten times as long.
    mypy = [sys.executable, "-m", "mypy", "--follow-imports", "skip", "--cache-dir", os.devnull, "program.py"]
    run([*mypy, "--python-executable", str(folder / "bin" / "python")], tmp_path, PYTHONPATH="")
    for file in site.glob("*.pth"):
        file.unlink()
    with pytest.raises(AssertionError, match="Cannot find implementation or library stub for module named"):
        run([*mypy, "--python-executable", str(folder / "bin" / "python")], tmp_path, PYTHONPATH="")


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
