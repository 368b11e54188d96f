"""The demo's screen while a system is under load: layers, KV pages, queue and time to first token."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxserve.bench.prometheus import Scrape
from jaxserve.core.precision import BITS

PRECISIONS_BY_BITS = sorted(BITS, key=lambda precision: BITS[precision])
FULL_STYLE = "black on #9ecae1"
STYLES = {"int8": "black on #f0e442", "int4": "black on #e69f00", "int3": "black on #d55e00"}
USED, FREE, BEYOND = "#0072b2", "#bdd7e7", "grey30"
BAR = 60  # characters for `max_pages`
PLAIN_EVERY_S = 2.0  # between lines when the output is not a terminal
SHOWN_EVENTS = 12


@dataclass(frozen=True)
class State:
    """The server's state in one scrape."""

    time_s: float
    swapped: Mapping[str, int]  # layers by quantised precision, fewest bits first
    pages: int  # KV pages in the pool
    used: int  # KV pages in use
    running: int  # requests
    waiting: int  # requests
    ttft_s: float | None  # mean over first tokens since the scrape before

    @classmethod
    def of(cls, time_s: float, scrape: Scrape, before: Scrape | None) -> "State":
        """Return the state in a scrape; `before` is the scrape before it."""
        values, earlier = scrape.values, before.values if before else {}

        def increase(name: str) -> float:
            return values.get(name, 0.0) - earlier.get(name, 0.0)

        first_tokens = increase("time_to_first_token_seconds_count") if before else 0
        return cls(
            time_s,
            {name: int(values.get(f'layers_by_precision{{precision="{name}"}}', 0)) for name in PRECISIONS_BY_BITS},
            int(values.get("kv_pages_total", 0)),
            int(values.get("kv_pages_used", 0)),
            int(values.get("num_requests_running", 0)),
            int(values.get("num_requests_waiting", 0)),
            increase("time_to_first_token_seconds_sum") / first_tokens if first_tokens else None,
        )


class Screen:
    """A screen that draws the state of one system in place, and lists every change."""

    def __init__(self, console: Console, title: str, order: Sequence[int], max_pages: int, slo_s: float):
        """`order` lists the layers in the order in which they are swapped."""
        self._console, self._title, self._order = console, title, order
        self._max_pages, self._slo_s = max_pages, slo_s
        self._live: Live | None = None
        self._before: tuple[Scrape, State] | None = None
        self._ttft: float | None = None
        self._events: list[str] = []
        self._printed_s = float("-inf")

    @contextmanager
    def shown(self) -> Iterator["Screen"]:
        """Draw every scrape inside; if the output is not a terminal, print lines now and then."""
        if not self._console.is_terminal:
            self._console.print(self._title)
            yield self
            return
        with Live(console=self._console, refresh_per_second=8) as self._live:
            yield self

    def look(self, time_s: float, scrape: Scrape) -> None:
        """Take in a scrape made `time_s` seconds after the start of the load."""
        state = State.of(time_s, scrape, self._before[0] if self._before else None)
        self._ttft = self._ttft if state.ttft_s is None else state.ttft_s
        change = _change(self._before[1], state) if self._before else ""
        self._before = (scrape, state)
        if change:
            self._events.append(f"{time_s:5.1f} s  {change}")
        if self._live:
            self._live.update(self._drawn(state))
        elif change or time_s - self._printed_s >= PLAIN_EVERY_S:
            self._printed_s = time_s
            self._console.print(self._line(state, change), highlight=False, soft_wrap=True)

    def _drawn(self, state: State) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        table.add_row("layers", self._layers(state))
        table.add_row("KV pages", self._pages(state))
        table.add_row("requests", f"{state.running} running, {state.waiting} waiting")
        table.add_row("TTFT", self._latency())
        heading = Text(f"{self._title}   {state.time_s:5.1f} s", style="bold")
        return Group(heading, table, *(Text(event, style="dim") for event in self._events[-SHOWN_EVENTS:]))

    def _layers(self, state: State) -> Text:
        swapped = [STYLES[name] for name, count in state.swapped.items() for _ in range(count)]
        # The first layers of the order have the fewest bits.
        styles = dict(zip(self._order, swapped, strict=False))
        text = Text()
        for layer in range(len(self._order)):
            text.append(f" {layer} ", styles.get(layer, FULL_STYLE))
            text.append(" ")
        return text.append(f" {_precisions(state)}")

    def _pages(self, state: State) -> Text:
        used, pages = (round(BAR * count / self._max_pages) for count in (state.used, state.pages))
        text = Text("█" * used, USED).append("█" * (pages - used), FREE)
        return text.append("·" * (BAR - pages), BEYOND).append(f" {state.used} of {state.pages}", "default")

    def _latency(self) -> Text:
        if self._ttft is None:
            return Text("-")
        kept = self._ttft <= self._slo_s
        return Text(f"{self._ttft:.2f} s (SLO {self._slo_s:g} s)", "green" if kept else "bold red")

    def _line(self, state: State, change: str) -> str:
        ttft = "-" if self._ttft is None else f"{self._ttft:.2f} s"
        seen = (
            f"{state.time_s:5.1f} s  layers {_precisions(state)}; {state.used:3d} of {state.pages} KV pages, "
            f"{state.running:2d} running, {state.waiting:3d} waiting, TTFT {ttft}"
        )
        return f"{seen}  <- {change}" if change else seen


def _precisions(state: State) -> str:
    """Describe the precisions of the layers: "2 in int4, 6 in int8"."""
    return ", ".join(f"{count} in {name}" for name, count in state.swapped.items() if count) or "in full precision"


def _change(before: State, after: State) -> str:
    """Describe the change since the last scrape, or return ""."""
    changes = {name: count - before.swapped[name] for name, count in after.swapped.items()}
    parts = [f"{_layers(count)} to {name}" for name, count in changes.items() if count > 0]
    if (back := -sum(changes.values())) > 0:
        parts.append(f"{_layers(back)} back to full precision")
    if after.pages != before.pages:
        parts.append(f"KV {before.pages} to {after.pages} pages")
    return ", ".join(parts)


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"
