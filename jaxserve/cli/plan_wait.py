"""Waiting until a server has changed its instances as an operator asked."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.cli.plan_client import PlanClient, ServerRefused
from jaxserve.control.plan_edits import PlanEdit
from jaxserve.control.record import BY_OPERATOR

INTERVAL_S = 0.2  # between two looks at the server
MANUAL = "manual"  # the policy that carries out what operators ask for
SEEN = 10  # decisions that are looked at

Instances = Sequence[Mapping[str, Any]]


class PlanWait:
    """The wait for a change that a server has accepted, with the `answer` of `PlanClient.edit_plan`."""

    def __init__(self, client: PlanClient, edit: PlanEdit, answer: Mapping[str, Any], say: Callable[[str], None]):
        """`say` is called with what the server waits for, each time when that changes."""
        self._client, self._edit, self._say, self._note = client, edit, say, ""
        self._wanted = _kept(answer["wanted"]["instances"])
        self._since = float(answer["status"]["time"])

    def outcome(self) -> str:
        """Return what has been done. Raise `ServerRefused` if it failed, or if another operator decided otherwise."""
        began = time.monotonic()
        while True:
            status = self._client.status()
            instances = self._client.plan_dict()["instances"]
            if not status["busy"] and _kept(instances) == self._wanted:
                return f"done after {time.monotonic() - began:.1f} s: {_described(instances)}"
            self._check(status)
            time.sleep(INTERVAL_S)

    def _check(self, status: Mapping[str, Any]) -> None:
        if status["policy"] != MANUAL:
            raise ServerRefused(f"not done: the policy {status['policy']} decides now")
        decisions = self._client.decisions(SEEN)
        asked = [decision["reason"] for decision in decisions if decision["reason"].startswith(BY_OPERATOR)]
        if asked and not asked[-1].startswith(f"{BY_OPERATOR}{self._edit}, "):
            raise ServerRefused(f"not done: another operator has decided otherwise ({asked[-1]})")
        for decision in decisions:
            kind = decision["outcome"].partition(":")[0]
            if decision["time"] >= self._since and decision["policy"] == MANUAL and kind in ("failed", "rejected"):
                raise ServerRefused(
                    f"{decision['outcome']}. The server tries again until there is another plan or policy"
                )
        if status["note"] != self._note:
            self._note = status["note"]
            if self._note:
                self._say(self._note)


def _kept(instances: Instances) -> dict[str, tuple[Any, ...]]:
    """Return what a change by hand decides about each instance, by its name."""
    return {each["name"]: (_devices(each), each.get("draining", False)) for each in instances}


def _devices(instance: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(device for stage in instance["stages"] for device in stage["devices"])


def _described(instances: Instances) -> str:
    return ", ".join(
        f"instance {each['name']} on {' '.join(map(str, _devices(each)))}"
        + (", draining" if each.get("draining") else "")
        for each in instances
    )
