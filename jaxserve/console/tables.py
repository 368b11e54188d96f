"""Tables in the one style of all commands. Nothing in them is cut, and no text in them is read as markup.

A terminal gets a header with a rule. Texts wrap if the terminal is too narrow; if numbers would not fit either, each
row becomes a list of names and values. A file or pipe gets aligned plain text in lines of any length.
"""

import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

Cell = str | Text

GAP = 2  # spaces between two columns
# A number with an optional sign, unit, share or range, or a dash for a value that is missing.
NUMBER = re.compile(r"-|[~+-]*\d[\d.,]*(e[+-]?\d+)?( ?[A-Za-z%/]{1,5})?( ?(-|to) ?[+-]?\d[\d.,]*| \(.*\))?")


class Table:
    """A table that a console prints as it fits. Columns of numbers, except the first, are aligned to the right."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], title: str = ""):
        self.title = title
        self.columns = tuple(columns)
        self.rows = [tuple(_text(cell) for cell in row) for row in rows]
        cells = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        self._numeric = [
            index > 0 and any(cell.plain for cell in column) and all(_is_number(cell.plain) for cell in column)
            for index, column in enumerate(cells)
        ]
        self._widths = [
            max(map(cell_len, (name, *(cell.plain for cell in column))))
            for name, column in zip(self.columns, cells, strict=True)
        ]
        self._narrowest = [
            width if numeric else _longest_word(name, *(cell.plain for cell in column))
            for name, column, numeric, width in zip(self.columns, cells, self._numeric, self._widths, strict=True)
        ]

    def lines(self) -> list[str]:
        """Return the header and the rows as aligned plain text."""
        return [self._line([Text(name) for name in self.columns]), *map(self._line, self.rows)]

    def print(self, console: Console) -> None:
        """Print the table on a console."""
        console.print(self, soft_wrap=not console.is_terminal)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what a console shows."""
        if self.title:
            yield Text(self.title, style="bold", no_wrap=not console.is_terminal)
        if not console.is_terminal:
            yield Text("\n".join(self.lines()), no_wrap=True, overflow="ignore")
        elif sum(self._narrowest) + GAP * (len(self.columns) - 1) <= options.max_width:
            yield self._grid()
        else:
            for row in self.rows:
                yield from self._record(row)

    def _line(self, cells: Sequence[Text]) -> str:
        padded = []
        for cell, width, numeric in zip(cells, self._widths, self._numeric, strict=True):
            space = " " * (width - cell_len(cell.plain))
            padded.append(space + cell.plain if numeric else cell.plain + space)
        return (" " * GAP).join(padded).rstrip()

    def _grid(self) -> RichTable:
        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for name, numeric, narrowest in zip(self.columns, self._numeric, self._narrowest, strict=True):
            table.add_column(
                Text(name),
                justify="right" if numeric else "left",
                no_wrap=numeric,
                min_width=narrowest,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*row)
        return table

    def _record(self, row: Sequence[Text]) -> Iterable[Text | RichTable]:
        """Yield a row as a list of names and values below the first of them."""
        yield Text.assemble((f"{self.columns[0]} ", "bold"), row[0])
        values = RichTable.grid(padding=(0, GAP))
        values.add_column(no_wrap=True)
        values.add_column(overflow="fold")
        for name, cell in zip(self.columns[1:], row[1:], strict=True):
            values.add_row(Text(f"  {name}"), cell)
        yield values


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], console: Console, title: str = "") -> None:
    """Print a table on a console."""
    Table(columns, rows, title).print(console)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _longest_word(*texts: str) -> int:
    return max((cell_len(word) for text in texts for word in text.split()), default=0)


def _is_number(text: str) -> bool:
    return not text or NUMBER.fullmatch(text) is not None
