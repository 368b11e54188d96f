import json

import pytest

from jaxserve.calibration.texts import read_texts
from jaxserve.core.errors import ConfigError


def test_plain_file_is_one_text(tmp_path):
    (tmp_path / "some.txt").write_text("one\n\ntwo\n")
    assert read_texts(tmp_path / "some.txt") == ["one\n\ntwo\n"]


def test_every_json_line_is_one_text(tmp_path):
    texts = ["one", "two\u2028\x85still two", ""]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "some.jsonl").write_text("\n".join([*lines[:1], "  ", *lines[1:]]) + "\n\n")
    assert read_texts(tmp_path / "some.jsonl") == texts


@pytest.mark.parametrize("line", ['{"words": 1}', '{"text": 5}', '{"text"', "5", '{"text": null}'])
def test_error_for_a_json_line_without_text_names_the_line(tmp_path, line):
    (tmp_path / "some.jsonl").write_text(f'{{"text": "one"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=r"some\.jsonl: line 3"):
        read_texts(tmp_path / "some.jsonl")


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_error_for_an_unreadable_text_file_names_it(tmp_path, content):
    if content is not None:
        (tmp_path / "some.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*some\.txt: "):
        read_texts(tmp_path / "some.txt")
