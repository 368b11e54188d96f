"""Files given by users: every fault is a one-line error that names the file."""

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.core.files import ensure_file, ensure_folder, parse_json, parse_yaml, read_text


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
