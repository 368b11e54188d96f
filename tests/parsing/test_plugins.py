"""Formats of a user's file: the one of the documentation, and files that are wrong."""

import re
from pathlib import Path

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.parsing.plugins import reasoning_formats, tool_formats
from jaxserve.parsing.registry import reasoning_format, tool_format
from tests.parsing.writers import calls_of, parsed

PAGE = Path(__file__).parents[2] / "docs" / "parsers.md"
EXAMPLE = next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "ToolFormat" in code)


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes a plugin and returns its file."""

    def write(text: str, name: str = "plugin.py") -> Path:
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


def test_format_of_the_page_finds_calls_in_pieces_of_any_size(write):
    form = tool_format("auto", "", tool_formats(write(EXAMPLE)))
    answer = 'Wait.\n<call>get_weather: {"city": "Bern </call>"}</call>\n<call>now: {}</call><call> no call'
    for size in (1, 3, len(answer)):
        message = parsed(form, *(answer[i : i + size] for i in range(0, len(answer), size)))
        assert calls_of(message) == [("get_weather", {"city": "Bern </call>"}), ("now", {})]
        assert message.text == "Wait.<call> no call"


def test_names_choose_among_formats_and_built_in_parsers(write):
    own = tool_formats(write(EXAMPLE))
    assert tool_format("colon", "", own) is own["colon"]
    assert tool_format("hermes", "", own).name == "hermes"
    assert tool_format("none", "", own) is None
    with pytest.raises(ConfigError, match=r"unknown tool parser 'semicolon': choose from .*colon"):
        tool_format("semicolon", "", own)
    both = EXAMPLE + "\n\nclass Other(Colon):\n    name = 'other'\n\n\nMORE = ReasoningFormat('more')\n"
    assert [*tool_formats(write(both, "both.py"))] == ["colon", "other"]
    with pytest.raises(ConfigError, match=r"has the tool parsers colon, other: choose one \(--tool-parser\)"):
        tool_format("auto", "", tool_formats(write(both, "both.py")))
    with pytest.raises(ConfigError, match=r"has the reasoning parsers angles, more: choose one"):
        reasoning_format("auto", "", reasoning_formats(write(both, "both.py")))
    for name in ("other", "Other"):
        assert [*tool_formats(f"{write(both, 'both.py')}:{name}")] == ["other"]
    assert [*reasoning_formats(f"{write(both, 'both.py')}:MORE")] == ["more"]


def changed(old: str, new: str) -> str:
    assert old in EXAMPLE
    return EXAMPLE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("x = 1\ny = = 2\n", 2, "invalid syntax"),
        ("\n\nimport nothing_of_this_name\n", 3, "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def f():\n    raise KeyError('a\\nb')\n\n\nf()\n", 2, "KeyError: "),
        ("raise SystemExit\n", 1, "SystemExit"),
        ("x = 1\n", None, "it defines no such format, which is a subclass of ToolFormat of jaxserve.parsing"),
        (changed('    name = "colon"\n', ""), "class Colon", "Colon: it has no name"),
        (changed('"colon"', '"hermes"'), None, "'hermes' is the name of a built-in parser"),
        (changed('("<call>",)', "()"), "class Colon", "neither triggers nor first"),
        (changed("    def after(self):", "    def afterwards(self):"), "class Colon", "abstract method"),
        (
            changed('f"<call>{name}: "', 'f"<Call>{name}: "'),
            "class Colon",
            "begins with '<Call>get_weather: '",
        ),
        (changed('f"<call>{name}: "', 'f"<call>{name} "'), "class Colon", "is not found in an answer that consists of"),
        (
            changed(' and (yield from source.comes("{"))', ""),
            "class Colon",
            """'<call>get_weather: </call>' has no object, but is a call: check source.comes("{") in head""",
        ),
        (
            changed("Head(name) if found", "Heads(name) if found"),
            "Heads(name)",
            "NameError: name 'Heads' is not defined",
        ),
    ],
)
def test_error_in_a_file_names_the_file_and_the_line(write, text, line, reason):
    file = write(text)
    if isinstance(line, str):
        line = next(number for number, row in enumerate(text.splitlines(), 1) if line in row)
    with pytest.raises(ConfigError) as error:
        tool_formats(file)
    message = str(error.value)
    assert message.startswith(f"{file}:{line}: " if line else f"{file}: ")
    assert reason in message
    assert message.endswith("(--tool-parser-plugin)")
    assert "\n" not in message


def test_file_that_is_missing_or_has_no_reasoning_is_named(write, tmp_path):
    for source in (tmp_path / "absent.py", tmp_path, "x.txt", f"{tmp_path}/absent.py:Colon"):
        with pytest.raises(ConfigError, match=r"is no Python file: give FILE.py or FILE.py:NAME \(--tool-parser"):
            tool_formats(source)
    with pytest.raises(ConfigError, match=r"an object of ReasoningFormat .* \(--reasoning-parser-plugin\)"):
        reasoning_formats(write("x = 1\n"))
    with pytest.raises(ConfigError, match="it defines no such format"):
        tool_formats(f"{write(EXAMPLE)}:Comma")


def test_file_runs_once_until_it_changes(write, tmp_path):
    count = tmp_path / "count"
    text = f"with open({str(count)!r}, 'a') as file:\n    file.write('x')\n\n"
    file = write(text + EXAMPLE)
    tool_formats(file), reasoning_formats(file), tool_formats(f"{file}:colon")
    assert count.read_text() == "x"
