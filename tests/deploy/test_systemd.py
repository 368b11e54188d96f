"""The systemd unit: its syntax, and what it must agree on with the options in its YAML file."""

import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.deploy.serve_line import DEPLOY, MARGIN_S, ROOT, longest_end, options

UNIT = DEPLOY / "systemd" / "jaxserve.service"
SETTINGS: dict[str, list[str]] = defaultdict(list)
for line in UNIT.read_text().splitlines():
    if "=" in line and not line.startswith("#"):
        name, _, value = line.partition("=")
        SETTINGS[name].append(value)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_knows_every_setting(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/jaxserve/bin/jaxserve", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_command_starts_a_server_that_can_end_before_it_is_killed():
    program, command, *words = shlex.split(SETTINGS["ExecStart"][0])
    assert (program, command) == ("/opt/jaxserve/bin/jaxserve", "serve")
    assert words == ["--config", "/etc/jaxserve/jaxserve.yaml"]
    _, settings = options([], DEPLOY / "systemd" / "jaxserve.yaml")
    assert settings.local
    assert int(SETTINGS["TimeoutStopSec"][0]) >= longest_end(settings) + MARGIN_S


def test_caches_go_to_the_folder_that_the_service_may_write():
    folder = f"/var/cache/{SETTINGS['CacheDirectory'][0]}"
    environment = dict(pair.split("=") for pair in SETTINGS["Environment"][0].split())
    assert environment["HOME"] == folder
    assert f"{environment['XDG_CACHE_HOME']}/jaxserve" == folder
    assert environment["HF_HOME"].startswith(folder)


def test_documented_commands_put_the_files_where_the_unit_finds_them(tmp_path):
    page = (ROOT / "docs" / "deployment.md").read_text()
    (block,) = re.findall(r"```\n(python3 -m venv .*?)```", page, re.DOTALL)
    lines = [line.replace("/etc/", f"{tmp_path}/etc/") for line in block.splitlines() if line.startswith("install ")]
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=ROOT, check=True)
    assert (tmp_path / "etc/systemd/system/jaxserve.service").read_text() == UNIT.read_text()
    assert (tmp_path / "etc/jaxserve/jaxserve.yaml").exists()
    assert (tmp_path / "etc/jaxserve/jaxserve.env").stat().st_mode & 0o777 == 0o600
    assert SETTINGS["EnvironmentFile"] == ["-/etc/jaxserve/jaxserve.env"]
