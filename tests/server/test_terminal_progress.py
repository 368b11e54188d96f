"""The progress that commands show while an engine starts."""

import io

import pytest
from rich.console import Console

from jaxserve.cli import terminal
from jaxserve.core.progress import COMPILING, LOADING, QUANTISING, READING


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the buffer of a console that is not a terminal."""
    file = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=file, highlight=False))
    return file


def test_lines_are_few_where_there_is_no_terminal(written: io.StringIO) -> None:
    now = iter(range(1000))  # a second for every look at the clock
    with terminal.show_progress(lambda: next(now)) as progress:
        for done in range(30):
            progress(QUANTISING, done, 30)
        progress(READING, 30, 30)
    lines = written.getvalue().splitlines()
    assert 1 <= len(lines) <= 5
    assert lines[0].startswith("quantising weights: ")
    assert lines[0].endswith(" of 30")


def test_progress_ends_with_the_number_of_compilations(written: io.StringIO) -> None:
    now = iter((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0))
    with terminal.show_progress(lambda: next(now)) as progress:
        progress(COMPILING, 0, 2)
        progress(COMPILING, 2, 2)
    assert "compiled 2 programs in" in written.getvalue()
    assert "next start" in written.getvalue()


def test_a_start_that_finds_all_compiled_says_nothing(written: io.StringIO) -> None:
    with terminal.show_progress(lambda: 0.0) as progress:
        progress(READING, 1, 1)
        progress(LOADING, 5, 5)
    assert written.getvalue() == ""


def test_progress_in_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=file, force_terminal=True, width=100))
    with terminal.show_progress() as progress:
        progress(COMPILING, 3, 143)
        shown, hidden = (file.getvalue().rfind(code) for code in ("\x1b[?25h", "\x1b[?25l"))
    assert shown > hidden, "a process that is killed now would leave the terminal without a cursor"
    assert "compiling programs" in file.getvalue()
    assert "143" in file.getvalue()
