"""Feed: what one viewer of the dashboard has not seen yet."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from jaxserve.server.state import Phase, ServerState

INTERVAL = 1.0  # seconds between two events
SHOWN_DECISIONS = 100


class Feed:
    """Turns an engine's state into events: the first has all the history, later ones what is new."""

    def __init__(self, state: ServerState):
        self._state = state
        self._control = state.control()
        client = state.loaded
        assert client is not None  # it has a control plane
        self._client = client
        self._model = (state.settings.served_model_names or (client.info.name,))[0]
        self._seen = float("-inf")  # time of the newest sample that was sent
        self._decisions: list[dict[str, Any]] | None = None

    def event(self) -> dict[str, Any]:
        """The state now, samples since the last call, and decisions if any is new or has another outcome. Mutates."""
        samples = self._control.history(self._seen)
        if samples:
            self._seen = samples[-1]["time"]
        event = {
            "model": self._model,
            "phase": self._state.phase.value,
            "status": self._control.status(),
            "samples": samples,
        }
        decisions = self._control.decisions(SHOWN_DECISIONS)
        if decisions != self._decisions:
            event["decisions"] = self._decisions = decisions
        return event

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """One event a second, until the server has drained."""
        while True:
            yield self.event()
            if self._state.phase is Phase.DRAINING and not self._working():
                return
            await asyncio.sleep(INTERVAL)

    def _working(self) -> bool:
        now = self._client.snapshot()
        return now.num_running + now.num_waiting > 0
