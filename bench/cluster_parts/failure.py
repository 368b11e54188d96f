"""The failure of the cluster demonstration: a device of a group fails, and its answers go on elsewhere."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cluster_parts.dashboard import save_dashboard
from bench.cluster_parts.load import Load, figures
from bench.cluster_parts.setup import GROUP, Setup
from bench.cluster_parts.watch import Watch

DEVICE, STEP = 1, 150  # the device that fails, and at which of its steps, which are those of the group
STREAMS = 4
OPTIONS = ("--policy", "manual", "--inject-fault", f"{DEVICE}:{STEP}")  # of the server


async def failed_device(url: str, began: float, out: Path, say: Callable[[str], None], patience_s: float) -> dict:
    """Let a device of a group fail while requests stream, and return what came of them."""
    watch = Watch(url, began, say)
    async with Load(url, began) as load, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        names = [state["name"] for state in (await watch.look())["instance_states"]]
        await watch.edit("drop", *names[:GROUP])
        grouped = await watch.until(lambda status: status["num_instances"] == 1 and not status["busy"], patience_s)
        records = await load.burst(STREAMS)
        survived = await watch.until(lambda status: not status["busy"], patience_s)
        devices = [device for state in (await watch.look())["instance_states"] for device in state["devices"]]
        await asyncio.to_thread(save_dashboard, url, out)
        again = await load.burst(1)
        watching.cancel()
    await watch.close()
    faults = [*load.errors] if grouped else ["no group began"]
    faults += [] if survived and DEVICE not in devices else [f"device {DEVICE} is still in use"]
    failures = [each["reason"] for each in watch.decisions if "has failed" in each["reason"]]
    faults += [] if failures else [f"no instance has failed: device {DEVICE} computed fewer than {STEP} steps"]
    shown: dict[str, Any] = {"failures": failures, "devices": devices, "events": watch.events}
    return shown | {"streams": figures(records), "afterwards": figures(again), "faults": faults}


def failing_setup() -> Setup:
    """Return the setup of the demonstration: one group, on virtual devices."""
    return Setup(GROUP, virtual=True)
