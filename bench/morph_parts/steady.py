"""The cost of plan changes to concurrent steps: a steady decode while layers and KV pools change to and fro."""

import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import numpy as np

from bench.morph_parts.measure import MODEL_NAME, started
from bench.morph_parts.systems import INT4, PERFORMANCE, QUANTISED, Setup, planned
from jaxserve.bench.client import Client, Target
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.workload import Sample
from jaxserve.control.plan import Plan
from jaxserve.control.plan_yaml import from_yaml, to_yaml
from jaxserve.engine.step_log import Recording, read_log

SEQUENCES, PROMPT = 4, 32
BEFORE_S, LOOKS_BEFORE, LOOK_S = 0.4, 6, 0.1
MAX_GAP_S = 0.5  # between two steps of a continuing decode
YAML = {"content-type": "application/yaml"}
MORE, FEWER = "more pages", "fewer pages"
CHANGE = re.compile(r"(?:KV|layers\.\d+) (\S+) -> (\S+) ")


@dataclass(frozen=True)
class PlanChange:
    """One change of all layers to the precision `after`, or of the pools to more or fewer pages.

    It lasts from the decision until the replaced memory is freed. Step times are mean times between the ends of steps
    that only decode.
    """

    after: str
    seconds: float
    steps: int
    step_before_s: float
    step_during_s: float
    max_gap_s: float  # longest time between steps during the change

    @property
    def ratio(self) -> float:
        """The step time during the change over the step time before it."""
        return self.step_during_s / self.step_before_s


def measure_plan_changes(setup: Setup, *, seconds: float, tokens: int) -> list[PlanChange]:
    """Decode for `seconds` while layers change to int4, pools take the freed memory, and all is restored, repeatedly.

    Answers have `tokens` tokens. The server's policy may want all layers in int4, so that it has the programs for that;
    the first plan sent to it replaces the policy. Raise JaxserveError if the server does not start, and
    httpx2.HTTPError if it refuses a plan.
    """
    length = PROMPT + tokens
    setup = replace(setup, kv_pages=(SEQUENCES + 2) * length // 16 + 64, max_model_len=length, max_num_seqs=SEQUENCES)
    _, known = planned(setup)
    system, max_pages = known[PERFORMANCE], known[INT4].kv_pages
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.log"
        with started(replace(system, serve_args=(*system.serve_args, "--step-log", str(log)))) as url:
            asyncio.run(_to_and_fro(url, max_pages, seconds, tokens))
        return found_in(read_log(log))


def found_in(recording: Recording) -> list[PlanChange]:
    """Return the plan changes of a step log that have steps before and during them."""
    steps = sorted(recording.steps, key=lambda step: step.ended)
    ends, versions = (np.array([getattr(step, name) for step in steps]) for name in ("ended", "version"))
    gaps = np.diff(ends, prepend=-np.inf)
    decodes = (gaps < MAX_GAP_S) & np.array([step.prefill == 0 for step in steps], bool)
    found = []
    for decision in recording.decisions:
        afters = {_after(line) for line in decision.transitions}
        new = np.flatnonzero(versions >= decision.target_version)
        if len(afters) != 1 or len(new) < 2:
            continue
        # By then, all that was dispatched before the first step of the new plan has ended.
        freed = ends[new[1]]
        before = gaps[decodes & (ends < decision.time) & (ends > decision.time - BEFORE_S)]
        during = gaps[decodes & (ends > decision.time) & (ends <= freed)]
        if len(before) and len(during):
            times = float(before.mean()), float(during.mean()), float(during.max())
            found.append(PlanChange(*afters, float(freed - decision.time), len(during), *times))
    return found


def _after(transition: str) -> str:
    """Return the precision, or the direction of the pool, that a transition in the log leads to."""
    found = CHANGE.search(transition)
    assert found is not None, transition
    before, after = found.groups()
    return (MORE if int(after) > int(before) else FEWER) if after.isdecimal() else after


def plan_change_table(found: Sequence[PlanChange]) -> str:
    """Return Markdown with a row for each direction."""
    rows = []
    for after in dict.fromkeys(change.after for change in found):
        some = [change for change in found if change.after == after]

        def middle(name: str, scale: float = 1.0, some: Sequence[PlanChange] = some) -> float:
            return float(np.median([getattr(change, name) for change in some])) * scale

        rows.append(
            f"| {after} | {len(some)} | {middle('seconds', 1e3):.0f} | {middle('steps'):.0f} | "
            f"{middle('step_before_s', 1e3):.2f} | {middle('ratio'):.2f}x | "
            f"{max(change.ratio for change in some):.2f}x | {middle('max_gap_s', 1e3):.1f} |"
        )
    head = "| to | times | took, ms | steps | before, ms | during, median | worst | longest step, ms |"
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", *rows])


async def _to_and_fro(url: str, max_pages: int, seconds: float, tokens: int) -> None:
    target = Target(url, MODEL_NAME, extra_body={"temperature": 0}, ignore_eos=True)
    end = time.monotonic() + seconds
    async with Client(target) as client, httpx2.AsyncClient(base_url=url, trust_env=False) as admin:
        decoding = [asyncio.create_task(_decode(client, n, tokens, end)) for n in range(SEQUENCES)]
        full = await _plan(admin)
        layers = [block.block for block in full.instances[0].blocks if block.block.startswith("layers.")]
        small = full.with_precisions("0", dict.fromkeys(layers, QUANTISED))
        while time.monotonic() < end:
            for wanted in (small, small.with_kv_pages("0", max_pages + 1), small, full):
                # Also before the change, so that the server answers as many requests before as during it.
                for _ in range(LOOKS_BEFORE):
                    await _plan(admin)
                    await asyncio.sleep(LOOK_S)
                (await admin.put("/admin/plan", content=to_yaml(wanted), headers=YAML)).raise_for_status()
                while (await _plan(admin)).instances != wanted.instances:
                    await asyncio.sleep(LOOK_S)
        await asyncio.gather(*decoding)


async def _plan(admin: httpx2.AsyncClient) -> Plan:
    """Return the plan in force."""
    return from_yaml((await admin.get("/admin/plan", params={"format": "yaml"})).raise_for_status().text)


async def _decode(client: Client, number: int, tokens: int, end: float) -> None:
    """Request one answer after the other."""
    prompt = tuple(range(300 + number, 300 + number + PROMPT))
    while time.monotonic() < end:
        await client.send(Sample(prompt, PROMPT, tokens), RequestRecord(number, 0.0, 0.0, PROMPT))
