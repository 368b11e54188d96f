"""The times of an instance's steps: what they took, and what the cost model expected of them."""

from collections import deque
from math import inf

from jaxserve.control.costs import InstanceCost
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.work import Work


class StepTimes:
    """A count of the seconds of ended steps.

    A step takes the time from its begin, or from the end of the previous step if that is later, until its end. In a
    busy engine these times add up to the time that passes, whether the device or the host is slower. The stages of a
    pipeline compute several steps at once: such a step is expected to take its share of the time.
    """

    def __init__(self, loads: Loads | None = None, cost: InstanceCost | None = None, *, stages: int = 1):
        """`cost`: the step times under the plan in force, None if they are unknown. It needs `loads`."""
        self.cost = cost
        self.busy = 0.0  # s that ended steps took
        self.expected = 0.0  # s that the cost of the plan in force at their begin expected of the same steps
        self._loads = loads
        self._stages = stages
        self._newest = StepLoad(0, 0, 0, 0, 0)  # load of the step that began last
        self._open: deque[tuple[float, float]] = deque()  # (begin, expected s) of the steps that have not ended
        self._last_end = -inf

    def begun(self, work: Work, now: float) -> None:
        """Count the begin of a step, before the next one is scheduled."""
        expected = 0.0
        if self.cost is not None and self._loads is not None:
            self._newest = self._loads.of(work)
            expected = self.cost.seconds(self._newest) / min(len(self._open) + 1, self._stages)
        self._open.append((now, expected))

    def ended(self, now: float) -> None:
        """Count the end of the oldest step that has not ended."""
        begin, expected = self._open.popleft()
        self.busy += now - max(begin, self._last_end)
        self.expected += expected
        self._last_end = now

    def repeated(self, count: int, end: float) -> None:
        """Count the ends of `count` steps and the begins of as many, which decode the sequences of the newest step.

        Two steps have begun and not ended, before and afterwards. The last of the `count` steps ends at time `end`, and
        each of the others when the next one starts on the device.
        """
        (begin, first), (_, second) = self._open
        self.busy += end - max(begin, self._last_end)
        self._last_end = end
        before_last = last = 0.0
        if self.cost is not None:
            now, longer = (self.cost.seconds(self._longer(steps)) for steps in (0, 1))
            growth = longer - now  # of each further step
            self.expected += first + second + count * now + growth * (count * (count + 1) / 2)
            before_last, last = (second if count == 1 else now + growth * (count - 1)), now + growth * count
            self.expected -= before_last + last  # these two have not ended
            self._newest = self._longer(count)
        self._open = deque([(end, before_last), (end, last)])

    def _longer(self, steps: int) -> StepLoad:
        """Return the load of the newest step after so many further steps, in which each sequence has grown."""
        newest = self._newest
        context = newest.context + steps * newest.sequences
        return StepLoad(newest.tokens, newest.rows, newest.sequences, context, newest.prefill)
