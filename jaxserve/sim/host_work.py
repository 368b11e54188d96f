"""The host's work on the steps of a simulated instance: it dispatches programs, and passes tokens on to clients.

A step is prepared while the one before it runs, so that this work only counts where it takes longer than that step.
Blocks are dispatched one by one, or as one program if steps are fused. On hardware with `overheads.fuse`, which stands
for an engine of 2026-11-28, one thread fuses the programs of a shape that is used often while the engine serves, and
for a part of that time nothing else goes on.
"""

from collections import Counter
from collections.abc import Hashable

from jaxserve.control.plan import InstancePlan
from jaxserve.core.precision import BITS
from jaxserve.core.step_load import StepLoad
from jaxserve.sim.hardware import Overheads

PATIENCE = 32  # uses of a shape after which its programs are fused while an engine serves
FUSED_PROGRAMS = 2  # of a step: all blocks, and the sampler
OTHER_PROGRAMS = 4  # of a step block by block: inputs, embedding, head and sampler
ARRAYS = 6  # of a layer: four weights and two norms
SCALES = 4  # arrays more of a layer in fewer bits
SHARED = 1.5


class HostWork:
    """The host's work on the steps of one instance, over virtual time."""

    def __init__(self, overheads: Overheads, *, fused: InstancePlan | None):
        """`fused` is the plan whose steps are fused before the engine serves if they only decode."""
        self._overheads, self._fused = overheads, fused
        self._uses: Counter[Hashable] = Counter()
        self._fused_at: dict[Hashable, float] = {}  # s
        self._busy_until = 0.0  # s: of the thread that fuses
        self._stalls: list[tuple[float, float]] = []  # s: begins and ends of what that thread does alone

    @classmethod
    def of(cls, overheads: Overheads, *, fused: InstancePlan | None) -> "HostWork | None":
        """Return the host's work, or None if it takes no time."""
        return cls(overheads, fused=fused) if overheads.loop or overheads.program or overheads.answer else None

    def seconds(self, plan: InstancePlan, load: StepLoad, now: float) -> float:
        """Return the time (s) from the end of a step until the host has dispatched another one with this load."""
        costs, programs = self._overheads, self._programs(plan, load, now)
        work = costs.loop + costs.program * programs + costs.array * _arrays(plan) + costs.answer * load.sequences
        return self._stalled(now) + work

    def is_settled(self, plan: InstancePlan, load: StepLoad, now: float) -> bool:
        """Return whether the host's work on steps of this shape stays what it is."""
        if not self._overheads.fuse:
            return True
        return now >= self._busy_until and self._fused_at.get(_key(plan, load), now + 1) <= now

    def _stalled(self, now: float) -> float:
        return next((end - now for begin, end in self._stalls if begin <= now < end), 0.0)

    def _programs(self, plan: InstancePlan, load: StepLoad, now: float) -> int:
        """Return how many programs a step runs, and begin to fuse them if it is time to."""
        key, layers = _key(plan, load), len(plan.layer_precisions)
        if not self._overheads.fuse:
            fused = self._is_of_fused(plan) and load.tokens == load.rows
            return FUSED_PROGRAMS if fused else layers + OTHER_PROGRAMS
        if (ready := self._fused_at.get(key)) is not None:
            return FUSED_PROGRAMS if ready <= now else layers + OTHER_PROGRAMS
        self._uses[key] += 1
        if self._uses[key] >= PATIENCE:
            begin = max(now, self._busy_until)
            self._stalls = [
                *(stall for stall in self._stalls if stall[1] > now),
                (begin, begin + self._overheads.stall * layers),
            ]
            self._busy_until = begin + self._overheads.fuse * layers
            self._fused_at[key] = self._busy_until
        return layers + OTHER_PROGRAMS

    def _is_of_fused(self, plan: InstancePlan) -> bool:
        """Return whether a plan has the layers and the pools of the plan whose steps are fused."""
        fused = self._fused
        if fused is None:
            return False
        return (plan.layer_precisions, plan.kv_pages) == (fused.layer_precisions, fused.kv_pages)


def _key(plan: InstancePlan, load: StepLoad) -> Hashable:
    """Return what determines a fused program: layers, pools and the shape of the step."""
    return plan.layer_precisions, plan.kv_pages, load.tokens, load.rows


def _arrays(plan: InstancePlan) -> int:
    return sum(ARRAYS + SCALES * (precision in BITS) for precision in plan.layer_precisions)
