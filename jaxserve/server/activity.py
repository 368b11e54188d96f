"""The line about the load that a server logs every few seconds while there is any."""

import asyncio
import logging
from collections.abc import Callable

from jaxserve.engine.client import EngineClient
from jaxserve.telemetry import Snapshot

logger = logging.getLogger(__name__)


class Activity:
    """The work of an engine between two looks at it. Rates follow from the counters of its snapshots."""

    def __init__(self, client: EngineClient, now: float):
        """`now`: seconds of any clock."""
        self._client = client
        self._before, self._time = client.snapshot(), now

    def line(self, now: float) -> str | None:
        """Return the load since the previous call in one line, or None if the engine has done nothing since then.

        The tokens of prompts are those that were computed, and "prefix cache" is the share of the tokens of prompts
        that were found in it.
        """
        snapshot, before, room = self._client.snapshot(), self._before, self._client.waiting_room().count
        seconds, self._before, self._time = now - self._time, snapshot, now
        waiting = snapshot.num_waiting + room
        if not (snapshot.num_running or waiting or snapshot.steps != before.steps):
            return None
        prompt = (snapshot.prefill_tokens - before.prefill_tokens) / seconds
        generation = (snapshot.generated_tokens - before.generated_tokens) / seconds
        parts = [
            f"running {snapshot.num_running}",
            f"waiting {waiting}",
            f"prompt {prompt:.1f} tok/s",
            f"generation {generation:.1f} tok/s",
            f"KV {snapshot.kv_usage:.1%}",
            *_prefix_cache(snapshot, before),
        ]
        if preempted := snapshot.preemptions - before.preemptions:
            parts.append(f"preempted {preempted}")
        if snapshot.layers_by_precision:
            parts.append(f"layers: {snapshot.layers_text}")
        if (instances := len(self._client.instances())) > 1:
            parts.append(f"instances: {instances}")
        return ", ".join(parts)


def _prefix_cache(snapshot: Snapshot, before: Snapshot) -> list[str]:
    if not (queries := snapshot.prefix_queries - before.prefix_queries):
        return []
    return [f"prefix cache {(snapshot.prefix_hits - before.prefix_hits) / queries:.1%}"]


async def log_activity(client: EngineClient, interval: float, clock: Callable[[], float]) -> None:
    """Log a line every `interval` seconds while there is work, and one when it has ended. Return only if cancelled."""
    activity = Activity(client, clock())
    while True:
        await asyncio.sleep(interval)
        if line := activity.line(clock()):
            logger.info("%s", line)
