"""The file name of a saved result."""

import json

import pytest

from jaxserve.bench.options import ResultOptions
from jaxserve.cli.publish import publish
from jaxserve.core.errors import ConfigError


def saved(folder, label: str) -> list[str]:
    publish({"kind": "serve", "label": label, "date": "20260102-030405"}, ResultOptions(save_result=folder))
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("köln 日本", "köln 日本-20260102-030405.json"),
        ("a/../b", "a-..-b-20260102-030405.json"),
        ("..", "-20260102-030405.json"),
        ("two\nlines\0", "two-lines--20260102-030405.json"),
        ("日" * 300, f"{'日' * 44}-20260102-030405.json"),
    ],
)
def test_result_file_of_any_label_is_in_the_folder(tmp_path, label, name):
    assert saved(tmp_path, label) == [name]
    assert json.loads((tmp_path / name).read_text())["label"] == label


def test_results_of_one_second_do_not_replace_each_other(tmp_path):
    saved(tmp_path, "a")
    assert saved(tmp_path, "a") == ["a-20260102-030405-2.json", "a-20260102-030405.json"]


def test_a_result_that_cannot_be_saved_is_printed(tmp_path, capsys):
    result = {"kind": "serve", "label": "a", "date": "20260102-030405", "completed": 3}
    with pytest.raises(ConfigError, match="cannot write"):
        publish(result, ResultOptions(save_result=tmp_path / f"{'x' * 300}.json"))
    assert "Successful requests" in capsys.readouterr().out
