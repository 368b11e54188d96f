"""Progress bars in a terminal, in a notebook, and where there is neither."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.console.progress import ProgressBar, phases, progress_bar, start_progress
from jaxserve.core.errors import ConfigError
from jaxserve.core.progress import COMPILING, COMPILING_UNKEPT, LOADING, QUANTISING, READING


def seconds() -> Callable[[], float]:
    """Return a clock that goes on by a second whenever it is read."""
    now = iter(range(10_000))
    return lambda: float(next(now))


class Written:
    """What standard error has got, which is not a terminal."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys, self._text = capsys, ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Written:
    return Written(capsys)


def count(bar: ProgressBar, steps: int) -> None:
    for _ in range(steps):
        bar.advance()


# -- a pipe or a file


def test_lines_are_few_and_move_where_there_is_no_terminal(written: Written) -> None:
    with progress_bar("requests", 60, clock=seconds()) as bar:
        count(bar, 60)
    *lines, last = written.getvalue().splitlines()
    assert 2 <= len(lines) <= 6
    done = [int(re.fullmatch(r"requests: (\d+) of 60, \d+ s left", line)[1]) for line in lines]
    assert done == sorted(set(done))
    assert re.fullmatch(r"requests: done in \d+ s", last)


def test_short_work_writes_nothing(written: Written) -> None:
    with progress_bar("requests", 3, clock=lambda: 0.0) as bar:
        count(bar, 3)
    assert written.getvalue() == ""


def test_each_phase_tells_the_time_that_is_left(written: Written) -> None:
    with phases(seconds()) as begin:
        for name in ("first", "second"):
            done = begin(name, 40)
            for _ in range(20):
                done(2)
            assert re.search(rf"{name}: \d+ of 40, \d+ s left\n", written.getvalue())
            assert re.search(rf"{name}: done in \d+ s\n", written.getvalue())


def test_short_phase_has_one_line(written: Written) -> None:
    with phases(lambda: 0.0) as begin:
        begin("quantising layers", 3)(3)
        assert written.getvalue() == "quantising layers: done in 0 s\n"
    assert written.getvalue() == "quantising layers: done in 0 s\n"


def test_bytes_are_shown_with_their_unit_and_speed(written: Written) -> None:
    with progress_bar("model.safetensors", 3_500_000_000, unit="B", clock=seconds()) as bar:
        for _ in range(15):
            bar.advance(100_000_000)
    found = re.search(r"model.safetensors: \d+\.\d [MG]B of 3.5 GB, \d+\.\d MB/s, \d+ s left", written.getvalue())
    assert found, written.getvalue()


def test_speed_of_a_download_that_goes_on_leaves_out_what_was_there(written: Written) -> None:
    with start_progress(clock=seconds()) as report:
        for step in range(20):
            report("downloading org/name", 900_000_000 + 1_000_000 * step, 1_000_000_000)
    assert re.search(r"downloading org/name: 9\d\d\.\d MB of 1\.0 GB, \d+\.\d kB/s, ", written.getvalue())


def test_work_that_fails_is_not_called_done(written: Written) -> None:
    def fail() -> None:
        with progress_bar("requests", 60, clock=seconds()) as bar:
            count(bar, 30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "requests: " in written.getvalue()
    assert "done" not in written.getvalue()


@pytest.mark.parametrize("stream", ["none", "closed", "full"])
def test_stream_that_cannot_be_written_harms_no_work(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    file = None if stream == "none" else open("/dev/full", "w")  # noqa: SIM115
    if file is not None and stream == "closed":
        file.close()
    monkeypatch.setattr(sys, "stderr", file)
    with start_progress(clock=seconds()) as progress:
        for done in range(40):
            progress(COMPILING, done, 40)
    if file is not None:
        with contextlib.suppress(OSError):  # what is left in its buffer cannot be written either
            file.close()


# -- a start


def test_start_counts_programs_of_all_compilers(written: Written) -> None:
    with start_progress(clock=seconds()) as progress:
        for total in (2, 3):
            for done in range(total + 1):
                progress(COMPILING, done, total)
    assert "compiled 5 programs in" in written.getvalue()
    assert "next start" in written.getvalue()


def test_start_that_compiles_one_program_says_so(written: Written) -> None:
    with start_progress(clock=seconds()) as progress:
        for done in range(2):
            progress(COMPILING, done, 1)
    assert re.search(r"compiled 1 program in .* loads it$", written.getvalue(), re.MULTILINE)


def test_start_without_a_cache_promises_nothing(written: Written) -> None:
    with start_progress(clock=seconds()) as progress:
        for done in range(3):
            progress(COMPILING_UNKEPT, done, 2)
    assert "compiled 2 programs in" in written.getvalue()
    assert "next start" not in written.getvalue()


def test_start_that_compiles_for_a_moment_says_nothing(written: Written) -> None:
    with start_progress(clock=lambda: 7.0) as progress:
        progress(COMPILING, 0, 2)
        progress(COMPILING, 2, 2)
    assert written.getvalue() == ""


def test_start_that_finds_all_compiled_says_nothing(written: Written) -> None:
    with start_progress(clock=lambda: 0.0) as progress:
        progress(READING, 1, 1)
        progress(LOADING, 5, 5)
    assert written.getvalue() == ""


def test_start_without_progress_says_nothing(written: Written) -> None:
    with start_progress(False, clock=seconds()) as progress:
        for done in range(60):
            progress(QUANTISING, done, 60)
        progress(COMPILING, 3, 3)
    assert "quantising" not in written.getvalue()
    assert "compiled" not in written.getvalue()


def test_start_reports_to_a_function_alone(written: Written) -> None:
    reported: list[tuple[str, int, int]] = []
    with start_progress(lambda *report: reported.append(report)) as progress:
        progress(READING, 1, 2)
    assert reported == [(READING, 1, 2)]
    assert written.getvalue() == ""


# -- a notebook


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Return the outputs of a notebook's cell, each with the texts that it has shown."""
    found: list[list[str]] = []

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        found.append([data["text/plain"]])
        return SimpleNamespace(update=lambda data, raw: found[-1].append(data["text/plain"]))

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return found


def test_notebook_rewrites_one_line(outputs: list[list[str]], written: Written) -> None:
    with start_progress(clock=seconds()) as progress:
        progress(READING, 1, 2)
        progress(COMPILING, 1, 4)
        progress(COMPILING, 4, 4)
    (texts,) = outputs
    assert texts[0].startswith("reading weights: 1 of 2")
    assert any(text.startswith("compiling programs: 1 of 4") for text in texts)
    assert texts[-1].startswith("compiled 4 programs in")
    assert written.getvalue() == ""


def test_notebook_shows_nothing_of_short_work(outputs: list[list[str]]) -> None:
    with progress_bar("requests", 3, clock=lambda: 0.0) as bar:
        count(bar, 3)
    assert outputs == []


# -- a terminal

PRELUDE = """
import itertools, sys, threading, time
from jaxserve.console.progress import phases, progress_bar, start_progress
"""


def in_terminal(code: str, **environment: str) -> tuple[str, str]:
    """Run code whose standard error is a terminal; return what the terminal and standard output have got."""
    parent, child = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    variables |= {"TERM": "xterm-256color", "COLUMNS": "80"} | environment
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=child, env=variables, text=True,
    )  # fmt: skip
    os.close(child)
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                shown.append(os.read(parent, 65536))
            except OSError:  # the process has ended
                return
            if not shown[-1]:
                return

    reader = threading.Thread(target=read)
    reader.start()
    output, _ = process.communicate(timeout=60)
    reader.join()
    os.close(parent)
    return b"".join(shown).decode(), output


def last_screen(shown: str) -> str:
    """Return the text after the last time that the display was erased, without control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", re.split(r"\x1b\[2K", shown)[-1]).strip()


def test_terminal_shows_bars_of_threads_and_of_nested_work_as_one_display() -> None:
    shown, output = in_terminal(
        """
        def work(name):
            with progress_bar(name, 2, keep=False) as bar:
                time.sleep(0.1)
                bar.advance(2)
        with progress_bar("requests [/x]", 4) as bar:
            threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(2)]
            for thread in threads: thread.start()
            with start_progress(clock=itertools.count().__next__) as progress:
                progress("compiling programs", 3, 143)
                time.sleep(0.2)
            for thread in threads: thread.join()
            print("to standard output")
            bar.advance(4)
        """
    )
    assert output == "to standard output\n"
    assert "3/143" in shown
    assert "thread 0" in shown
    assert "requests [/x]" in last_screen(shown) or "requests [/x]" in shown
    assert "4/4" in shown
    assert "compiled 3 programs" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the terminal would be left without a cursor"


def test_terminal_keeps_its_cursor_and_its_bar_after_an_interrupt() -> None:
    shown, output = in_terminal(
        """
        try:
            with phases() as begin:
                begin("quantising layers", 8)(3)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            print("interrupted")
        with progress_bar("again", 1) as bar:
            bar.advance()
        """
    )
    assert output == "interrupted\n"
    assert "quantising layers" in shown
    assert "3/8" in shown
    assert "again" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")


def test_terminal_without_colours_and_simple_terminals_get_no_codes_for_them() -> None:
    code = """
        with progress_bar("requests", 4) as bar:
            bar.advance(4)
        """
    plain, _ = in_terminal(code, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3\d", plain)
    assert "4/4" in plain
    simple, _ = in_terminal(code, TERM="dumb")
    assert "\x1b" not in simple


@pytest.mark.parametrize("progress", ["no", 2, []])
def test_progress_that_is_neither_a_switch_nor_a_function_is_refused(progress) -> None:
    with (
        pytest.raises(ConfigError, match=r"progress is .*: it must be true, false or a function"),
        start_progress(progress),
    ):
        pass
