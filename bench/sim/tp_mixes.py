"""Goodput of the policy `tp_transform` and of every static mix of degrees, on a trace with a long tail.

    python -m bench.sim.tp_mixes [--quick] [--between SECONDS] [--out FOLDER]

Short requests come at random at a rate, and now and then a long one (the AMOEBA paper, 2.4). The goodput of a system
is the largest rate of short requests at which nine of ten short and nine of ten long requests meet the SLO: for the
first token 10 s, as in the paper, and 1 ms for each token of the prompt; for short ones also the paper's 100 ms between
tokens. Only mixes are shown that can hold all requests.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from bench.sim.amoeba import SLO_TPOT, SLO_TTFT, built, cluster, parser_of, report, served, with_degrees
from bench.sim.runs import table
from jaxserve.sim.build import BuiltSimulation
from jaxserve.sim.simulation import Answered, SimRequest

DEVICES, PER_TOKEN = 8, 1e-3  # s for each token of the prompt
LONG = 10_000  # tokens of the prompt of a long request
BETWEEN, LONGEST = 150.0, 110_000  # s between two long requests on the mean (by default), tokens
SHARE = 0.9  # of each kind of requests that must be within the SLO
STEPS = 6  # of the search for the largest rate


def trace(rate: float, seconds: float, between: float, seed: int = 0) -> list[SimRequest]:
    """Return short requests at a rate, and long ones, the same at every rate."""
    rng, tail = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    requests = []
    for time in np.cumsum(rng.exponential(1 / rate, int(rate * seconds * 1.3) + 50)):
        if time < seconds:
            inputs = int(np.clip(rng.lognormal(np.log(800), 0.7), 16, 2_800))
            requests.append(SimRequest(float(time), inputs, int(np.clip(rng.lognormal(np.log(400), 0.5), 8, 1_000))))
    time = float(tail.exponential(between))
    while time < seconds:
        tokens = int(np.clip(43_000 * (1 + tail.pareto(1.5)), 0, LONGEST))
        requests.append(SimRequest(time, tokens, int(tail.integers(100, 500))))
        time += float(tail.exponential(between))
    return requests


def is_good(answers: Sequence[Answered]) -> bool:
    """Return whether enough requests of both kinds meet the SLO."""
    met: dict[bool, list[bool]] = {True: [], False: []}
    for answer in answers:
        request, good = answer.request, False
        if answer.first_token is not None and answer.last_token is not None:
            first = answer.first_token - request.arrival
            each = (answer.last_token - answer.first_token) / max(answer.output_tokens - 1, 1)
            long = request.input_tokens > LONG
            good = first <= SLO_TTFT + PER_TOKEN * request.input_tokens and (long or each <= SLO_TPOT)
        met[request.input_tokens > LONG].append(good)
    return all(sum(each) >= SHARE * len(each) for each in met.values())


def goodput(system: Callable[[], BuiltSimulation], seconds: float, between: float, steps: int) -> float:
    """Return the largest rate (short requests/s) that a system serves within the SLO; 0 if there is none."""
    low, high = 0.0, 8.0
    for _ in range(steps):
        middle = (low + high) / 2
        good = is_good(served(system(), trace(middle, seconds, between)))
        low, high = (middle, high) if good else (low, middle)
    return low


def mixes(smallest: int) -> Iterator[tuple[int, ...]]:
    """Yield all mixes of degrees with an instance of at least the `smallest` degree that holds every request."""
    for fours in range(DEVICES // 4 + 1):
        for twos in range((DEVICES - 4 * fours) // 2 + 1):
            mix = (4,) * fours + (2,) * twos + (1,) * (DEVICES - 4 * fours - 2 * twos)
            if mix[0] >= smallest:
                yield mix


def name_of(mix: Sequence[int]) -> str:
    """Return the name of a mix, as 4x1 + 1x4."""
    return " + ".join(f"{mix.count(degree)}x{degree}" for degree in (1, 2, 4) if degree in mix)


def static(links: str, mix: Sequence[int]) -> BuiltSimulation:
    """Return the simulation of a static mix."""
    return built(with_degrees(cluster(links=links), mix))


def compare(links: str, seconds: float, between: float, steps: int) -> list[tuple[object, ...]]:
    """Return the rows of one kind of links: the goodput of each system, and what the policy has of it."""
    smallest = 4 if links == "paper" else 2
    rates = {}
    for mix in mixes(smallest):
        rates[name_of(mix)] = goodput(partial(static, links, mix), seconds, between, steps)
    dynamic = goodput(lambda: built(cluster("tp_transform", links=links)), seconds, between, steps)
    rows: list[tuple[object, ...]] = [
        (name, f"{rate:.2f}", f"{dynamic / rate:.2f} x" if rate else "-") for name, rate in rates.items()
    ]
    return [*rows, ("tp_transform", f"{dynamic:.2f}", "")]


def main() -> None:
    """Compare all systems, with both kinds of links, and report."""
    made = parser_of(__doc__)
    made.add_argument("--between", type=float, default=BETWEEN, help="mean seconds between two long requests")
    options = made.parse_args()
    seconds, steps = (60.0, 1) if options.quick else (max(600.0, 2 * options.between), STEPS)
    text = "# Goodput of dynamic and static degrees, Qwen2.5-32B on 8 x H20, simulated\n"
    for links, what in (("nvlink", "NVLink"), ("paper", "Links and longest contexts of the paper's table 1")):
        header = ("instances", "short requests/s", "tp_transform is better by")
        text += f"\n## {what}\n\n{table(header, compare(links, seconds, options.between, steps))}\n"
    report(options, "tp-mixes", text)


if __name__ == "__main__":
    main()
