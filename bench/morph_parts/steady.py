"""What an exchange of layers costs the steps beside it: a steady decode, in which all layers change to and fro."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import httpx
import numpy as np

from bench.morph_parts.measure import MODEL_NAME, started
from bench.morph_parts.systems import ACCURACY, QUANTISED, Setup, System, envelope, systems
from jaxserve.bench.client import Client, Target
from jaxserve.bench.prometheus import parse
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.workload import Sample
from jaxserve.control.plan_yaml import from_yaml, to_yaml

SEQUENCES, PROMPT = 4, 32
PAUSE_S, LOOK_S = 0.5, 0.02
YAML = {"content-type": "application/yaml"}


@dataclass(frozen=True)
class Exchange:
    """All layers have changed to `after`; seconds of a step, by the server's own count, before and meanwhile."""

    after: str
    seconds: float
    step_before_s: float
    step_during_s: float

    @property
    def ratio(self) -> float:
        """How much longer a step took meanwhile."""
        return self.step_during_s / self.step_before_s


@dataclass(frozen=True)
class Steps:
    """Of the engine since its start."""

    count: float
    seconds: float


def exchanges(setup: Setup, *, seconds: float, tokens: int) -> list[Exchange]:
    """Decodes answers of `tokens` tokens for `seconds`, and has all layers change to int4 and back all the while.

    Raises `JaxserveError` if the server does not start, httpx.HTTPError if it takes no plan.
    """
    length = PROMPT + tokens
    setup = replace(setup, kv_pages=(SEQUENCES + 2) * length // 16 + 64, max_model_len=length, max_num_seqs=SEQUENCES)
    room = envelope(setup)
    system = systems(setup, room)[ACCURACY]
    args = list(system.serve_args)
    args[args.index("--policy") + 1] = "manual"
    with started(System(system.name, system.kv_pages, tuple(args))) as url:
        return asyncio.run(_measure(url, room.full_precision, seconds, tokens))


def exchange_table(found: Sequence[Exchange]) -> str:
    """Markdown: a row for each direction."""
    rows = []
    for after in dict.fromkeys(exchange.after for exchange in found):
        some = [exchange for exchange in found if exchange.after == after]
        ratios, before = np.array([e.ratio for e in some]), np.median([e.step_before_s for e in some])
        rows.append(
            f"| {after} | {len(some)} | {np.median([e.seconds for e in some]) * 1e3:.0f} | {before * 1e3:.2f} | "
            f"{np.median(ratios):.2f}x | {ratios.max():.2f}x |"
        )
    head = "| all layers to | times | took, ms | step before, ms | step meanwhile, median | worst |"
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: | ---: |", *rows])


async def _measure(url: str, full: str, seconds: float, tokens: int) -> list[Exchange]:
    target = Target(url, MODEL_NAME, extra_body={"temperature": 0}, ignore_eos=True)
    end, found = time.monotonic() + seconds, []
    async with Client(target) as client, httpx.AsyncClient(base_url=url, trust_env=False) as admin:
        decoding = [asyncio.create_task(_decode(client, n, tokens, end)) for n in range(SEQUENCES)]
        while time.monotonic() < end:
            for precision in (QUANTISED, full):
                start = await _steps(admin)
                await asyncio.sleep(PAUSE_S)
                found.append(await _exchange(admin, precision, start))
        await asyncio.gather(*decoding)
    return [exchange for exchange in found if exchange is not None]


async def _decode(client: Client, number: int, tokens: int, end: float) -> None:
    """One answer after the other."""
    prompt = tuple(range(300 + number, 300 + number + PROMPT))
    while time.monotonic() < end:
        await client.send(Sample(prompt, PROMPT, tokens), RequestRecord(number, 0.0, 0.0, PROMPT))


async def _exchange(admin: httpx.AsyncClient, precision: str, start: Steps) -> Exchange | None:
    """Has all layers change, and waits until they have; None if no step ran beside that, or before."""
    plan = from_yaml((await admin.get("/admin/plan", params={"format": "yaml"})).raise_for_status().text)
    for number, instance in enumerate(plan.instances):
        layers = [block.block for block in instance.blocks if block.block.startswith("layers.")]
        plan = plan.with_precisions(number, dict.fromkeys(layers, precision))
    before, begin = await _steps(admin), time.monotonic()
    (await admin.put("/admin/plan", content=to_yaml(plan), headers=YAML)).raise_for_status()
    while not _done((await admin.get("/admin/status")).raise_for_status().json(), precision):
        await asyncio.sleep(LOOK_S)
    took, after = time.monotonic() - begin, await _steps(admin)
    if before.count == start.count or after.count == before.count:
        return None
    return Exchange(precision, took, _mean(start, before), _mean(before, after))


def _done(status: Mapping, precision: str) -> bool:
    layers = {layer["precision"] for instance in status["layers"] for layer in instance}
    return layers == {precision} and not status["busy"]


def _mean(early: Steps, late: Steps) -> float:
    return (late.seconds - early.seconds) / (late.count - early.count)


async def _steps(admin: httpx.AsyncClient) -> Steps:
    values = parse((await admin.get("/metrics")).raise_for_status().text, histograms=False).values
    return Steps(values["iteration_seconds_count"], values["iteration_seconds_sum"])
