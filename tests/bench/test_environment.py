import subprocess
from pathlib import Path

import pytest

from jaxserve._version import __version__
from jaxserve.bench import environment


def test_describes_the_machine_and_leaves_out_what_is_not_there(monkeypatch):
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


def test_a_checkout_tells_its_commit_and_whether_files_differ_from_it(checkout: Path):
    clean = environment.commit(checkout)
    assert clean is not None
    assert len(clean) == 12
    (checkout / "another").write_text("not tracked")
    assert environment.commit(checkout) == clean
    (checkout / "file").write_text("two")
    assert environment.commit(checkout) == f"{clean} with changes"


def test_a_package_inside_of_another_repository_has_no_commit(checkout: Path):
    installed = checkout / "site-packages"
    installed.mkdir()
    assert environment.commit(installed) is None


def test_a_program_that_fails_tells_nothing(tmp_path: Path):
    assert environment._output(["git", "-C", str(tmp_path), "rev-parse", "HEAD"]) is None
    assert environment._output(["no-such-program-anywhere"]) is None
