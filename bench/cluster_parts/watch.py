"""What happens to the instances of a server: their set as it changes, the waiting room, and the decisions."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx2

INTERVAL_S = 0.2  # between two looks
REGROUP = re.compile(r"instance (?P<before>.+?) -> (?P<after>.+)")  # a transition that merges or splits


class Watch:
    """An observer of one server, whose times are seconds after `began` on the monotonic clock."""

    def __init__(self, url: str, began: float, say: Callable[[str], None]):
        """`say` is called with a line for every change."""
        self.url = url
        self._http = httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30)
        self._began, self._say = began, say
        self._seen: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        self.decisions: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Look at the server until this is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> Mapping[str, Any]:
        """Take in the server's state now, and return its status."""
        status: dict[str, Any] = (await self._http.get("/admin/status")).raise_for_status().json()
        answer = await self._http.get("/admin/decisions", params={"limit": 1000})
        self.decisions = answer.raise_for_status().json()["decisions"]
        room = status["waiting_room"]
        waiting = f"{room['requests']} of up to {room['longest_tokens']} tokens" if room["requests"] else "empty"
        self._note("instances", described(status["instance_states"]))
        self._note("KV pages", str(status["kv_pages"]["total"]))
        self._note("waiting room", waiting)
        self._note("note", status["note"])
        return status

    async def until(self, condition: Callable[[Mapping[str, Any]], bool], timeout_s: float) -> bool:
        """Return whether the status fulfils a condition before the time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition(await self.look()):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(INTERVAL_S)
        return True

    async def edit(self, action: str, *instances: str, **options: Any) -> None:
        """Change the instances by hand. Raise `httpx2.HTTPStatusError` if the server refuses."""
        body = {"action": action, "instances": list(instances), **options}
        (await self._http.patch("/admin/plan", json=body)).raise_for_status()

    async def set_policy(self, name: str) -> None:
        """Let another policy decide."""
        (await self._http.put("/admin/policy", json={"policy": name})).raise_for_status()

    async def regroup_seconds(self) -> tuple[float, int]:
        """Return the seconds that all changes of the instances have taken so far, and their number."""
        text = (await self._http.get("/metrics")).raise_for_status().text
        found = dict(re.findall(r'jaxserve_transition_seconds_(sum|count)\{[^}]*kind="Regroup"[^}]*\} (\S+)', text))
        return float(found.get("sum", 0)), int(float(found.get("count", 0)))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _note(self, what: str, value: str) -> None:
        if self._seen.get(what, "") == value:
            return
        self._seen[what] = value
        seconds = time.monotonic() - self._began
        self.events.append({"time_s": seconds, "what": what, "value": value})
        if value:
            self._say(f"{seconds:6.1f} s  {what}: {value}")


def is_group(state: Mapping[str, Any]) -> bool:
    """Return whether an instance is a group, whose members keep one copy of their layers together."""
    return bool(state["lanes"] > 1)


def described(states: Sequence[Mapping[str, Any]]) -> str:
    """Return the instances and their devices in words, in the order of their devices."""
    parts = []
    for state in sorted(states, key=lambda state: min(state["devices"])):
        draining = ", draining" if state["draining"] else ""
        on = "stages on devices" if is_group(state) else "devices"
        parts.append(f"{state['name']} ({on} {' '.join(map(str, state['devices']))}{draining})")
    return "  ".join(parts)


def merges_and_splits(decisions: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many merges and splits were carried out."""
    merges = splits = 0
    for decision in decisions:
        for text in decision["transitions"] if decision["outcome"] == "done" else ():
            if found := REGROUP.fullmatch(text):
                before, after = (len(side.split(" and ")) for side in (found["before"], found["after"]))
                merges += before > after
                splits += after > before
    return merges, splits
