"""Names on a hub are told apart from paths."""

from pathlib import Path

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.hub import HubName, hub_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("org/name@main", HubName("org/name", "main")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name_1.2@0123abc", HubName("org/name_1.2", "0123abc")),
    ],
)
def test_name_and_revision(text, name):
    assert hub_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "path",
    [
        "./org/name",
        "/org/name",
        "~/name",
        "../org/name",
        ".name",
        "name",
        "one/two/three",
        "org/config.json",
        "org/model.gguf",
        "org/name@",
        "org/name@../x",
        "org/name@/x",
        "org--x/name",
        "org/a..b",
        "org/name ",
        "",
        Path("org/name"),
    ],
)
def test_paths_are_no_names(path):
    assert hub_name(path) is None


def test_what_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") is not None
    (tmp_path / "org/name").mkdir(parents=True)
    assert hub_name("org/name") is None


def test_name_without_an_organisation_is_a_path_unless_it_is_allowed():
    assert hub_name("gpt2") is None
    assert hub_name("gpt2", short=True) == HubName("gpt2")


def test_revision_as_an_option():
    assert hub_name("org/name", "v1") == HubName("org/name", "v1") == hub_name("org/name@v1", "v1")


@pytest.mark.parametrize(
    ("source", "revision", "match"),
    [
        ("org/name@v1", "v2", "give one revision"),
        ("./org/name", "v1", "is a path"),
        (Path("org/name"), "v1", "is a path"),
        ("org/name", "../v1", "a branch, a tag or a commit"),
    ],
)
def test_revision_that_contradicts_the_model(source, revision, match):
    with pytest.raises(ConfigError, match=match):
        hub_name(source, revision)
