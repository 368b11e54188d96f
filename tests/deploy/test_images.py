"""The images' recipe: what is copied, installed and started. Building them needs a daemon and is not tried here."""

import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch

import dockerfile
import pytest

from tests.deploy.serve_line import DEPLOY, ROOT, options
from tests.server.fake import FakeClient
from tests.server.serving import serving

STEPS = dockerfile.parse_file(str(DEPLOY / "Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]


def values(command: str) -> list[tuple[str, ...]]:
    return [step.value for step in STEPS if step.cmd == command]


def test_recipe_names_its_targets_and_runs_as_a_plain_user():
    stages = {value[-1] for value in values("FROM")}
    assert {"cpu", "cuda12"} <= stages
    for target in ("cpu", "cuda12"):
        start = next(index for index, step in enumerate(STEPS) if step.cmd == "FROM" and step.value[-1] == target)
        stage = []
        for step in STEPS[start + 1 :]:
            if step.cmd == "FROM":
                break
            stage.append(step)
        assert stage[-1].cmd == "USER"
        assert stage[-1].value == ("1000:1000",)


def test_extras_and_python_are_those_of_the_project():
    installs = [value[0] for value in values("RUN") if "pip install" in value[0]]
    asked = {text.split("[")[1].split("]")[0] for text in installs if "[" in text}
    assert asked == {"cuda12"}
    assert asked <= PROJECT["project"]["optional-dependencies"].keys()
    (version,) = (value[0].removeprefix("PYTHON=") for value in values("ARG"))
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]


def test_context_has_what_the_wheel_is_made_of():
    def is_sent(path: str) -> bool:
        sent = True
        for line in IGNORED:
            pattern = line.removeprefix("!").removeprefix("**/")
            if fnmatch(path, pattern) or fnmatch(path, f"{pattern}/*") or fnmatch(path.rsplit("/", 1)[-1], pattern):
                sent = line.startswith("!")
        return sent

    for path in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "jaxserve/llm.py"):
        assert (ROOT / path).exists()
        assert is_sent(path), path
    for path in ("configs/hardware/l4.yaml", "checkpoints/jaxserve-python-6m/config.json", "pallas_kernels/x.py"):
        assert is_sent(path), path
    for path in (".venv/bin/python", ".git/config", "tests/conftest.py", "build/real", "jaxserve/kernels/native/a.so"):
        assert not is_sent(path), path


def test_entry_point_takes_a_model_and_options():
    (entry,) = values("ENTRYPOINT")
    assert entry[:2] == ("jaxserve", "serve")
    engine, settings = options([*entry[2:], "Qwen/Qwen3-8B", "--max-num-seqs", "8"])
    assert (engine.model, engine.max_num_seqs, settings.host, settings.port) == ("Qwen/Qwen3-8B", 8, "0.0.0.0", 8000)


COMMANDS = {
    line.removeprefix("#").strip()
    for path in (DEPLOY / "Dockerfile", ROOT / "docs" / "deployment.md")
    for line in path.read_text().splitlines()
    if re.match(r"(#   )?docker (build|run) ", line)
}


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_documented_commands_name_existing_targets_and_options(line):
    words = shlex.split(line)
    stages = {value[-1] for value in values("FROM")}
    if words[1] == "build":
        given = dict(zip(words[2:-1:2], words[3:-1:2], strict=True))
        assert (ROOT / given["--file"]).samefile(DEPLOY / "Dockerfile")
        assert given["--target"] in stages
        assert given["--tag"] == f"jaxserve:{given['--target']}"
    else:
        image = next(index for index, word in enumerate(words) if word.startswith("jaxserve:"))
        assert words[image].removeprefix("jaxserve:") in stages
        options(words[image + 1 :])
        ((volume,),) = values("VOLUME")
        assert words[words.index("--volume") + 1] == f"jaxserve-cache:{volume}"


@pytest.mark.parametrize("healthy", [True, False])
def test_health_check_follows_the_server(healthy):
    ((kind, *command),) = values("HEALTHCHECK")
    assert kind == "CMD"
    assert command[0] == "python"
    with serving(FakeClient() if healthy else None) as address:
        code = command[2].replace("127.0.0.1:8000", f"127.0.0.1:{address.port}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode == 0) is healthy


def test_folders_of_caches_are_in_the_volume():
    environment = {name: value for step in values("ENV") for name, value in zip(step[::2], step[1::2], strict=True)}
    (volume,) = values("VOLUME")
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        assert (environment[name] + "/").startswith(volume[0] + "/")
