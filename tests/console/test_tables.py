"""Tables in a terminal of any width, and in a file or pipe."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from jaxserve.console.tables import Table, print_table

COLUMNS = ("layers", "nats a token", "share", "reason")
ROWS = [
    ("0", "0.01200", "0.383%", "[red]a text of some length that must wrap in a terminal of sixty columns"),
    ("all together", "12,345", "-", "x" * 70),
]


def printed(columns, rows, *, width: int | None = None, title: str = "") -> list[str]:
    """Return what a terminal of this width shows, without control codes; without a width, what a file gets."""
    file = io.StringIO()
    console = Console(file=file, width=width or 80, force_terminal=width is not None)
    print_table(columns, rows, console, title)
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()


def test_file_gets_aligned_plain_text_of_any_length() -> None:
    title, head, *rows = printed(COLUMNS, ROWS, title="a title that is longer than eighty characters, " * 2)
    assert len(title) > 80
    assert head == "layers        nats a token   share  reason"
    assert rows == [
        f"0                  0.01200  0.383%  {ROWS[0][3]}",
        f"all together        12,345       -  {ROWS[1][3]}",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_nothing_is_cut_in_a_terminal(width: int) -> None:
    lines = printed(COLUMNS, ROWS, width=width)
    assert all(cell_len(line) <= width for line in lines)
    given = "".join(cell for row in ROWS for cell in row)
    shown = "".join(lines)
    assert all(shown.count(character) >= given.count(character) for character in set(given) - {" "})


def test_numbers_never_wrap_and_a_row_becomes_a_list_if_they_do_not_fit() -> None:
    columns = ("batch", *(f"figure {number}" for number in range(9)))
    rows = [(str(batch), *(f"{number}23.45 (1..2)" for number in range(9))) for batch in (1, 32)]
    wide, narrow = printed(columns, rows, width=200), printed(columns, rows, width=80)
    assert len(wide) == 2 + len(rows)
    assert narrow[:3] == ["batch 1", "  figure 0  023.45 (1..2)", "  figure 1  123.45 (1..2)"]
    assert len(narrow) == 10 * len(rows)


def test_columns_of_numbers_are_aligned_to_the_right_except_the_first() -> None:
    rows = [("1", "1.2 GB", "~1.09x", "10.00 (8.00..12.00)", "1,000 - 2,000", "a1"), ("10", "7 MB", "-", "3", "5", "b")]
    lines = Table(("name", "size", "ratio", "spread", "range", "text"), rows).lines()
    assert lines == [
        "name    size   ratio               spread          range  text",
        "1     1.2 GB  ~1.09x  10.00 (8.00..12.00)  1,000 - 2,000  a1",
        "10      7 MB       -                    3              5  b",
    ]


def test_styled_cells_are_plain_in_a_file() -> None:
    assert printed(("outcome", "why"), [(Text("✓ done", "green"), Text("ö" * 100))]) == [
        "outcome  why",
        f"✓ done   {'ö' * 100}",
    ]
