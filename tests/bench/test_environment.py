import subprocess
from pathlib import Path

import pytest

from jaxserve._version import __version__
from jaxserve.bench import environment


def test_environment_leaves_out_unknown_fields(monkeypatch):
    monkeypatch.setattr(environment, "_output", lambda command: None)  # neither git nor nvidia-smi
    found = environment.describe_environment()
    assert found["jaxserve"] == __version__
    assert int(found["cores"]) >= 1
    assert "numpy" in found["packages"]
    assert "commit" not in found
    assert "gpus" not in found
    assert all(isinstance(value, str) and value for value in found.values())


def test_equal_gpus_are_counted(monkeypatch):
    told = "NVIDIA H200, 143771 MiB, 570.1\nNVIDIA H200, 143771 MiB, 570.1\nNVIDIA A10, 23028 MiB, 570.1"
    monkeypatch.setattr(environment, "_output", lambda command: told)
    assert environment.gpus() == ("2 x NVIDIA H200, 143771 MiB, driver 570.1; NVIDIA A10, 23028 MiB, driver 570.1")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    def git(*args: str) -> None:
        identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "file").write_text("one")
    git("init")
    git("add", "file")
    git("commit", "-m", "first")
    return tmp_path


def test_commit_of_a_checkout_says_whether_tracked_files_changed(checkout: Path):
    clean = environment.commit(checkout)
    assert clean is not None
    assert len(clean) == 12
    (checkout / "another").write_text("not tracked")
    assert environment.commit(checkout) == clean
    (checkout / "file").write_text("two")
    assert environment.commit(checkout) == f"{clean} with changes"


def test_package_inside_another_repository_has_no_commit(checkout: Path):
    installed = checkout / "site-packages"
    installed.mkdir()
    assert environment.commit(installed) is None


def test_output_of_a_failing_program_is_none(tmp_path: Path):
    assert environment._output(["git", "-C", str(tmp_path), "rev-parse", "HEAD"]) is None
    assert environment._output(["no-such-program-anywhere"]) is None
