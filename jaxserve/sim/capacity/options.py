"""The options of `jaxserve sim plan`, besides those that it shares with `jaxserve sim`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxserve.core.bundled import config_names
from jaxserve.core.errors import ConfigError
from jaxserve.core.options import Option

NOT_PRODUCTS = frozenset({"l4-marlin"})  # files of configs/hardware that describe what cannot be bought
CLUSTER_OPTIONS = frozenset(
    {"model", "memory_gb", "kv_cache_dtype", "max_model_len", "page_size", "prefix_caching", "max_num_seqs"}
    | {"max_num_batched_tokens", "max_quality_loss"}
)
"""Options of `ClusterOptions` that all plans have in common."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of the search for a plan."""

    goodput: Annotated[
        list[str] | None,
        Option(
            "Objectives",
            "Limits in ms, such as ttft:2000 tpot:50 e2el:9000, or of a percentile: ttft:p99:4000.",
            first=True,
        ),
    ] = None
    percentile: Annotated[
        float,
        Option("Objectives", "Percentile of the requests that a limit holds for, unless it names its own.", first=True),
    ] = 95.0
    hardware: Annotated[
        str | None,
        Option(
            "Candidates",
            "Names in configs/hardware or YAML files, such as h100,l4.",
            default="those with a price, else all products",
            first=True,
        ),
    ] = None
    price: Annotated[
        str | None,
        Option(
            "Candidates",
            "Prices of a device for an hour, such as l4=0.8,h100=3.",
            default="none: plans are ranked by the memory bandwidth of their devices",
            first=True,
        ),
    ] = None
    precisions: Annotated[str, Option("Candidates", "Precisions of the weights to consider.", first=True)] = (
        "auto,int8,int4"
    )
    policies: Annotated[
        str,
        Option(
            "Candidates", "Policies to consider, of which those that change layers begin in full precision.", first=True
        ),
    ] = "static,morph"
    max_devices: Annotated[int, Option("Candidates", "Most devices of a plan.", minimum=1, first=True)] = 64
    top: Annotated[int, Option("Answer", "Plans to show.", minimum=1)] = 5
    budget: Annotated[float, Option("Answer", "Seconds for the search; what was found by then is shown.", above=0)] = (
        300.0
    )
    jobs: Annotated[
        int | None, Option("Answer", "Processes that simulate.", default="one for each core", minimum=1)
    ] = None
    save_plan: Annotated[
        Path | None,
        Option("Answer", "YAML file for `jaxserve serve --config` that starts the cheapest plan.", first=True),
    ] = None
    json: Annotated[bool, Option("Answer", "Print the answer as JSON.")] = False
    save_result: Annotated[Path | None, Option("Answer", "File for the answer as JSON.")] = None

    # -- calibration
    calibrate: Annotated[
        Path | None,
        Option(
            "Calibration",
            "Result of `jaxserve bench serve` or `trace` on your machine, to fit its hardware to.",
            first=True,
        ),
    ] = None
    check: Annotated[
        list[Path] | None,
        Option("Calibration", "Result of another run, of which the errors are told (repeatable).", first=True),
    ] = None
    serve_args: Annotated[
        str | None,
        Option(
            "Calibration",
            'Arguments of the measured server, as in "MODEL --tp 2".',
            default="those that --spawn had, else --model",
        ),
    ] = None
    save_hardware: Annotated[
        Path | None, Option("Calibration", "YAML file for the fitted hardware, which --hardware takes.")
    ] = None

    def prices(self) -> dict[str, float]:
        """Return prices by hardware. Raise `ConfigError` if one is not of the form NAME=PRICE with a price above 0."""
        found: dict[str, float] = {}
        for text in _words(self.price or ""):
            name, _, price = text.partition("=")
            if not name or not re.fullmatch(r"\d+(\.\d+)?", price) or not float(price):
                raise ConfigError(f"--price has {text!r}: give NAME=PRICE, such as l4=0.8,h100=3")
            found[name] = float(price)
        return found

    def hardware_names(self) -> tuple[str, ...]:
        """Return the hardware to consider. Raise `ConfigError` if some of it has a price and some has none."""
        prices = self.prices()
        if self.hardware is None:
            return tuple(prices or (name for name in config_names("hardware") if name not in NOT_PRODUCTS))
        names = tuple(dict.fromkeys(_words(self.hardware)))
        if prices and (missing := [name for name in names if name not in prices]):
            raise ConfigError(f"--price has no price for {missing[0]}: add {missing[0]}=PRICE, or leave out all prices")
        return names

    def precision_names(self) -> tuple[str, ...]:
        """Return the precisions to consider."""
        return tuple(dict.fromkeys(_words(self.precisions)))

    def policy_names(self) -> tuple[str, ...]:
        """Return the policies to consider."""
        return tuple(dict.fromkeys(_words(self.policies)))


@dataclass(frozen=True)
class Cost:
    """The cost of devices: their prices for an hour, or a stand-in."""

    by_hardware: Mapping[str, float]  # of one device
    priced: bool

    def text(self, cost: float) -> str:
        """Return a cost as a table shows it."""
        return f"{cost:.2f}" if self.priced else f"{cost / 1e12:.2f}"

    @property
    def heading(self) -> str:
        """The heading of a column of costs."""
        return "per hour" if self.priced else "TB/s"


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,]+", text.strip()) if word]
