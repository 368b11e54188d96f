"""Files given by users: every fault is a one-line error that names the file."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.core.files import (
    ensure_file,
    ensure_folder,
    parse_json,
    parse_yaml,
    read_json_object,
    read_text,
    write_file,
)
from tests.support.file_size import file_size_limit


@pytest.mark.parametrize("name", ["absent.txt", "binary.txt", ".", "x" * 300])
def test_error_for_an_unreadable_file_names_it(tmp_path, name):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        read_text(tmp_path / name)
    assert str(caught.value).startswith(f"cannot read {tmp_path / name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "NaN}", "[" * 100_000, "\x00"])
def test_invalid_json_gives_a_one_line_error(text):
    with pytest.raises(ConfigError, match=r"^x\.json is not valid JSON: ") as caught:
        parse_json(text, "x.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[", "a: b: c", "2026-99-99", "[" * 100_000, "\x00", "a: !!python/object:x.y {}"])
def test_invalid_yaml_gives_a_one_line_error(text):
    with pytest.raises(ConfigError, match=r"^x\.yaml is not valid YAML: ") as caught:
        parse_yaml(text, "x.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 1", "x: [{a: {}}]\ny: &n {k: 1}\nz: {a: 1, b: *n,\n a: 2}"])
def test_key_that_is_given_twice_is_refused(text):
    with pytest.raises(ConfigError, match=r"^x\.yaml has 'a' twice, the second time in line [34]$"):
        parse_yaml(text, "x.yaml")


def test_keys_of_other_mappings_and_merged_ones_may_be_the_same():
    text = "a: &n {k: 1, j: 3}\nb: {<<: *n, k: 2}\nc: [{k: 1}, {k: 2}, *n]\nd: {1: 2, '1': 3}"
    value = parse_yaml(text, "x.yaml")
    assert (value["b"], value["d"]) == ({"k": 2, "j": 3}, {1: 2, "1": 3})
    assert parse_yaml("", "x.yaml") is None
    doubled = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    assert len(parse_yaml(doubled, "x.yaml")) == 60  # each node is looked at once


def test_unwritable_file_is_refused_before_the_computation(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^cannot write into .*file: .* \(--out\)"):
        ensure_folder(tmp_path / "file", "--out")
    with pytest.raises(ConfigError, match=r"it is a folder \(--out\)"):
        ensure_file(tmp_path, "--out")
    with pytest.raises(ConfigError, match=r"^cannot write into /proc: .* \(--out\)"):
        ensure_file(type(tmp_path)("/proc/x.json"), "--out")
    ensure_file(tmp_path / "new" / "x.json", "--out")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_json_object_of_a_model_is_read_or_named(tmp_path):
    file = tmp_path / "config.json"
    assert read_json_object(file, missing_ok=True) == {}
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        read_json_object(file)
    for text, message in (("{", "is not valid JSON"), ("[]", "is not a JSON object")):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=rf"config\.json {message}"):
            read_json_object(file)
    file.write_text('{"a": 1}')
    assert read_json_object(file) == {"a": 1}


def test_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "result.json"
    write_file(file, "old")
    with file_size_limit(10), pytest.raises(ConfigError, match=f"^cannot write {file}: File too large$"):
        write_file(file, "x" * 11)
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["result.json"])
    write_file(file, b"new")
    assert (file.read_text(), os.listdir(tmp_path)) == ("new", ["result.json"])


def test_what_a_link_points_to_is_replaced(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    write_file(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_device_is_written_and_not_replaced(tmp_path):
    write_file(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(ConfigError, match=r"^cannot write /dev/full: No space left on device$"):
        write_file(Path("/dev/full"), "text")


def test_file_that_threads_write_at_once_is_whole(tmp_path: Path) -> None:
    path, texts = tmp_path / "a.json", [str(digit) * 200_000 for digit in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_file(path, text), texts * 5))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]
