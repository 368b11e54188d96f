"""The burst of the cluster demonstration: instances drop layers for its KV, and get them back when it is over."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.cluster_parts.dashboard import save_dashboard
from bench.cluster_parts.load import Load, figures
from bench.cluster_parts.setup import GROUP, Setup
from bench.cluster_parts.watch import Watch, is_group

DROP, STATIC = "param_drop", "static"  # policies
BURST = 8  # requests for each instance
Say = Callable[[str], None]


async def dropped_by_hand(watch: Watch, setup: Setup, patience_s: float) -> bool:
    """Let instances drop layers and restore them by hand, which waits for the programs; return whether they did.

    These are the groups whose programs the server compiles ahead.
    """
    states = (await watch.look())["instance_states"]
    names = [state["name"] for state in sorted(states, key=lambda state: min(state["devices"]))]
    for first in range(0, setup.instances, GROUP):
        await watch.edit("drop", *names[first : first + GROUP])
        if not await watch.until(lambda status: bool(_groups(status)) and not status["busy"], patience_s):
            return False
        await watch.edit("restore", *_groups(await watch.look()))
        if not await watch.until(lambda status: not _groups(status) and not status["busy"], patience_s):
            return False
    return True


async def served_burst(watch: Watch, load: Load, setup: Setup, out: Path, patience_s: float) -> dict[str, Any]:
    """Send a burst under the policy param_drop, wait until all layers are back, and send it again under static.

    Return the figures of both, the KV pages, and what went wrong.
    """
    before = (await watch.look())["kv_pages"]["total"]
    await watch.set_policy(DROP)
    burst = asyncio.create_task(load.burst(BURST * setup.instances))
    dropped = await watch.until(lambda status: bool(_groups(status)) or burst.done(), patience_s)
    status = await watch.look()
    during, dropped = status["kv_pages"]["total"], dropped and bool(_groups(status))
    await asyncio.to_thread(save_dashboard, watch.url, out, "dashboard-group")
    with_drop = figures(await burst)
    restored = await watch.until(lambda status: not _groups(status) and not status["busy"], patience_s)
    after = (await watch.look())["kv_pages"]["total"]
    await watch.set_policy(STATIC)
    without = figures(await load.burst(BURST * setup.instances))
    faults = [] if dropped else ["no instances dropped layers in the burst"]
    faults += [] if restored and after == before else ["not all layers were restored"]
    faults += [] if during > before else [f"the drop left {during} KV pages of {before}"]
    pages = {"before": before, "after_drop": during, "after_restore": after}
    return {"kv_pages": pages, "burst": with_drop, "burst_without_drop": without, "faults": faults}


def _groups(status: Mapping[str, Any]) -> list[str]:
    return [state["name"] for state in status["instance_states"] if is_group(state)]
