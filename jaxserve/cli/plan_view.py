"""Views of a server's plan for a terminal. Text from the server is printed verbatim, never as markup."""

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from jaxserve.console.tables import Table
from jaxserve.control.plan_yaml import from_yaml, plan_rows

SHOWN_DECISIONS = 8
SHOWN_INSTANCES = 8
BAR_WIDTH = 40  # characters
# The smallest number of bits of a weight, a block whose height shows the bits, and a colour.
BLOCKS = ((16, "█", "blue"), (8, "▅", "cyan"), (4, "▃", "yellow"), (0, "▂", "magenta"))
OUTCOMES = {"done": ("✓", "green"), "started": ("◐", "yellow"), "failed": ("✕", "red"), "rejected": ("⊘", "red")}

Fields = Mapping[str, Any]


def overview(status: Fields, plan_yaml: str, decisions: Sequence[Fields]) -> RenderableType:
    """Return the plan as a table, the ledger of the fullest device and the latest decisions."""
    entries = sorted(status["ledger"].items(), key=lambda entry: -entry[1])
    used = sum(size for _, size in entries)
    devices = status.get("devices", ())
    memory = "memory" if len(devices) <= 1 else f"memory of the fullest of {len(devices)} devices"
    sizes = [(name, size_text(size)) for name, size in (*entries, ("left of the budget", status["budget"] - used))]
    ledger = Table((memory, "size"), sizes)
    parts: list[RenderableType] = [_headline(status), "", Table(*plan_rows(from_yaml(plan_yaml))), "", ledger]
    if decisions:
        parts += ["", decision_table(decisions, time.time() - status["time"])]
    return Group(*parts)


class LiveView:
    """The view of `plan watch`: the newest status, sample and decisions."""

    def __init__(self) -> None:
        self._event: Fields = {}
        self._sample: Fields = {}
        self._decisions: Sequence[Fields] = ()

    def update(self, event: Fields) -> "LiveView":
        """Show an event of the dashboard from now on, and return the view itself."""
        self._event = event
        self._decisions = event.get("decisions", self._decisions)
        self._sample = event["samples"][-1] if event["samples"] else self._sample
        return self

    def line(self) -> str:
        """Return the state in one line, for a file or a pipe."""
        status = self._event["status"]
        layers = ", ".join(f"{name} {count}" for name, count in sorted(status["precisions"].items()))
        plan = f"plan {status['plan_version']}"
        figures = (f"{name} {value}" for name, value in self._figures())
        return "  ".join((time.strftime("%H:%M:%S"), plan, status["policy"], _state(status), layers, *figures))

    def render(self) -> RenderableType:
        """Return the state with layers, memory and decisions, for a terminal."""
        status = self._event["status"]
        figures = Grid.grid(padding=(0, 2))
        for name, value in self._figures():
            figures.add_row(Text(name, style="dim"), value)
        parts: list[RenderableType] = [_headline(status), "", *_layer_lines(status), ""]
        if self._sample:
            parts += [_memory_bar(self._sample), ""]
        shown = self._decisions[-SHOWN_DECISIONS:]
        table = [decision_table(shown, time.time() - status["time"])] if shown else []
        return Group(*parts, figures, "", *table)

    def _figures(self) -> list[tuple[str, str]]:
        sample, status = self._sample, self._event["status"]
        if not sample:
            return []
        cache = sample["kv_used_bytes"] + sample["kv_free_bytes"]
        return [
            ("KV", f"{sample['kv_usage'] * 100:.0f} % of {size_text(cache)}"),
            ("running", str(sample["running"])),
            ("waiting", str(sample["waiting"])),
            ("TTFT P95", seconds_text(sample["ttft_p95"]) + _objective(status.get("slo_ttft"))),
            ("TPOT", seconds_text(sample["tpot"]) + _objective(status.get("slo_tpot"))),
        ]


def decision_table(decisions: Sequence[Fields], offset: float) -> Table:
    """Return a table of decisions, newest last.

    `offset` is added to the engine's clock to get seconds since the epoch.
    """
    rows = []
    for decision in decisions:
        kind, _, detail = decision["outcome"].partition(": ")
        sign, style = OUTCOMES.get(kind, ("·", ""))
        when = time.strftime("%H:%M:%S", time.localtime(decision["time"] + offset))
        versions = f"{decision['before_version']} → {decision['target_version']}"
        reason = "; ".join(filter(None, (decision["reason"], detail)))
        rows.append((when, Text(f"{sign} {kind}", style=style), versions, reason))
    return Table(("time", "outcome", "plan", "reason"), rows)


def size_text(size: float) -> str:
    """Return a number of bytes with three digits, such as "2.47 GB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= unit:
            return f"{_digits(size / unit)} {name}"
    return f"{size:.0f} B"


def seconds_text(seconds: float | None) -> str:
    """Return a duration in seconds or milliseconds with three digits, or a dash for None."""
    if seconds is None:
        return "-"
    return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(seconds * 1e3)} ms"


# -- helpers


def _digits(value: float) -> str:
    """Return a number with three significant digits: 4.20, 42.0, 420."""
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def _headline(status: Fields) -> Text:
    pages = status["kv_pages"]
    return Text.assemble(
        ("plan ", "dim"),
        (str(status["plan_version"]), "bold"),
        ("   policy ", "dim"),
        (status["policy"], "bold"),
        (f"   {_state(status)}", "yellow" if status["busy"] else "dim"),
        ("   KV pages ", "dim"),
        f"{pages['used']} of {pages['total']} in use, at most {pages['most']}",
        *((("   quality ", "dim"), quality_text(quality)) if (quality := status.get("quality")) else ()),
        (f"   {room} requests wait that no instance can hold" if (room := _in_room(status)) else "", "yellow"),
        (f"   {note}" if (note := status.get("note")) else "", "dim"),
    )


def quality_text(quality: Fields) -> str:
    """Return what a plan costs, such as "+1.2 % loss (0.04 nats a token, measured), floor 5 %"."""
    known = [] if quality["nats"] is None else [f"{quality['nats']:.2g} nats a token"]
    known += ["measured" if quality["measured"] else "assumed"]
    floor = "none" if quality["floor"] is None else f"{quality['floor'] * 100:g} %"
    return f"{quality['loss'] * 100:+.1f} % loss ({', '.join(known)}), floor {floor}"


def _in_room(status: Fields) -> int:
    room = status.get("waiting_room")
    return room["requests"] if room else 0


def _state(status: Fields) -> str:
    return f"changing to {status['target_version']}" if status["busy"] else "steady"


def _block_of(precision: str) -> tuple[str, str]:
    """Return the block and the colour of a precision, by the bits in its name."""
    bits = int("".join(filter(str.isdigit, precision)) or 16)
    return next((block, colour) for min_bits, block, colour in BLOCKS if bits >= min_bits)


def _objective(slo: float | None) -> str:
    return "" if slo is None else f" (SLO {slo:g} s)"


def _layer_lines(status: Fields) -> list[Text]:
    """Return a line for each of the instances that fit on a screen, with a block for each layer and a legend."""
    lines = []
    shown = status["layers"][:SHOWN_INSTANCES]
    states = status.get("instance_states", ())
    for layers, state in itertools.zip_longest(shown, states[: len(shown)], fillvalue=None):
        assert layers is not None, "there are at most as many states"
        line = Text.assemble(("layers ", "dim"))
        for layer in layers:
            line.append(*_block_of(layer["precision"]))
        counts = Counter(layer["precision"] for layer in layers)
        for name, count in counts.items():
            block, colour = _block_of(name)
            line.append(f"  {block} ", colour).append(f"{name} {count}")
        if state is not None and status["num_instances"] > 1:
            devices = ", ".join(map(str, state["devices"]))
            draining = ", draining" if state["draining"] else ""
            if (lanes := state.get("lanes", 1)) > 1:
                draining += f", a group of {lanes}"
            line.append(f"  instance {state['name']} on {devices}{draining}", "dim")
        lines.append(line)
    if (left := status["num_instances"] - len(shown)) > 0:
        layers = ", ".join(f"{name} {count}" for name, count in status["precisions"].items())
        lines.append(Text(f"and {left} more instances; layers of all: {layers}", "dim"))
    return lines


def _memory_bar(sample: Fields) -> Text:
    """Return a bar with the ledger's parts as shares of the budget."""
    parts = (
        ("other", sample["other_bytes"], "▓", "bright_black"),
        ("weights", sample["weight_bytes"], "█", "bright_black"),
        ("KV used", sample["kv_used_bytes"], "█", "green"),
        ("KV free", sample["kv_free_bytes"], "▒", "green"),
        ("KV rounding", sample["kv_rounding_bytes"], "░", "green"),
    )
    line, legend, end, drawn = Text.assemble(("memory ", "dim")), Text(), 0, 0
    for name, size, block, colour in parts:
        end += size
        width = round(BAR_WIDTH * end / sample["budget"]) - drawn
        drawn += width
        line.append(block * width, colour)
        legend.append(f"  {block} ", colour).append(f"{name} {size_text(size)}")
    line.append("·" * (BAR_WIDTH - drawn), "dim")
    return line.append(legend).append(f"  budget {size_text(sample['budget'])}", "dim")
