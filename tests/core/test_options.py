"""Options are defined once, on the fields of configurations."""

import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import pytest

from jaxserve import LLM, AsyncLLM, EngineConfig
from jaxserve.core.engine_options import EngineOptions
from jaxserve.core.errors import ConfigError
from jaxserve.core.options import Option, check_ranges, help_of, options_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Configuration:
    """A configuration with one option of each kind."""

    port: Annotated[int, Option("Server", "Where to listen.", minimum=0, maximum=65535)] = 8000
    budget: Annotated[float | None, Option("Memory", "How much.", above=0)] = None
    rate: Annotated[float, Option("Load", "How often; inf: at once.")] = float("inf")
    dtype: Annotated[Literal["a", "b"], Option("Model", "Which.")] = "a"
    names: Annotated[tuple[str, ...], Option("Model", "Names.", flags=("--name",))] = ()
    internal: int = -1


def test_options_are_the_annotated_fields_in_order():
    found = {field.name: (field.key, field.flag, field.repeated, field.range) for field in options_of(Configuration)}
    assert found == {
        "port": ("port", "--port", False, "from 0 to 65535"),
        "budget": ("budget", "--budget", False, "above 0"),
        "rate": ("rate", "--rate", False, ""),
        "dtype": ("dtype", "--dtype", False, ""),
        "names": ("name", "--name", True, ""),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 65536}, r"port is 65536: it must be an integer from 0 to 65535 \(--port\)"),
        ({"port": True}, "port is True: it must be an integer"),
        ({"port": None}, "port is None: it must be an integer"),
        ({"budget": 0}, r"budget is 0: it must be a number above 0 \(--budget\)"),
        ({"budget": float("inf")}, "budget is inf"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"dtype": "c"}, r"dtype is 'c': it must be one of a, b \(--dtype\)"),
    ],
)
def test_error_for_a_value_outside_its_range_names_the_limit(values, message):
    with pytest.raises(ConfigError, match=message):
        check_ranges(Configuration(**values))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "model is 5: it must be a text"),
        ({"tokenizer": b"x"}, "tokenizer is b'x': it must be a text"),
        ({"policy": 3}, "policy is 3: it must be a text"),
        ({"warmup": "no"}, "warmup is 'no': it must be true or false"),
        ({"variants": "int4"}, r"variants is 'int4': it must be a list, such as \('int4',\)"),
    ],
)
def test_error_for_a_value_of_a_wrong_type_names_the_right_one(options, message):
    with pytest.raises(ConfigError, match=message):
        check_ranges(EngineConfig(**options))


def test_paths_begin_in_the_users_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = EngineConfig(model="~/a", tokenizer=Path("~/b"), chat_template="~{{ x }}", compile_cache="~/c")
    assert (config.model, config.tokenizer, config.compile_cache) == ("/home/me/a", Path("/home/me/b"), "/home/me/c")
    assert config.chat_template == "~{{ x }}"


def test_defaults_are_in_range():
    check_ranges(Configuration())
    check_ranges(EngineConfig())


def test_library_signatures_equal_the_engine_options():
    names = [field.name for field in fields(EngineConfig)]
    for library in (LLM, AsyncLLM):
        assert list(inspect.signature(library).parameters) == ["model", "progress", *names[1:]]
    assert set(get_type_hints(EngineOptions)) == set(names) - {"model"}


def test_generated_files_are_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "generate-options"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_help_of_the_library_lists_all_options_with_their_texts(kind: type):
    shown = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    assert "progress: bool" in shown
    for field in options_of(EngineConfig):
        if field.name != "model":
            begin = re.split(r"--|max-num-seqs| [(]repeatable", " ".join(help_of(field).split()))[0].rstrip()
            assert f" {field.name}: {begin}" in shown
    assert "docs/" not in shown
    assert not re.search(r"--[a-z]|max-num|repeatable", shown), "options are keyword arguments here"
    assert "in place of those of generation_config: temperature" in shown
