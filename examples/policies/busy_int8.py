"""An example of a policy: all layers in int8 while sequences wait, full precision again when none waits.

python examples/policies/busy_int8.py      # print its decisions while a queue grows and empties; needs no model
jaxserve serve --policy examples/policies/busy_int8.py:BusyInt8
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.console.tables import Table
from jaxserve.control import InstancePlan, Proposal, Resources, SizeTable, block_chain, parallel_plan
from jaxserve.control.plan_yaml import plan_rows
from jaxserve.telemetry import Smoother, Snapshot


@dataclass(frozen=True)
class BusyInt8:
    """A policy with two plans for each instance: all layers in int8, or the plan of the start."""

    resources: Resources
    swap_order: Sequence[int]
    name: str = "busy-int8"
    precisions: tuple[str, ...] = ("int8",)  # that the server keeps ready

    def init(self, plan: InstancePlan) -> InstancePlan:
        return plan  # the state: the plan to return to

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: InstancePlan) -> Proposal[InstancePlan]:
        waiting, used = snapshot.recent.waiting, snapshot.kv_pages_used
        if plan == state and waiting > 4:
            small = plan.with_precisions({f"layers.{layer}": "int8" for layer in self.swap_order})
            small = small.with_kv_pages(self.resources.kv_capacity(small))
            return Proposal(small, state, f"{waiting:.1f} sequences waiting > 4: all layers to int8")
        if plan != state and waiting == 0 and used < (pages := state.kv_pages - 1) / 2:
            return Proposal(state, state, f"none waited for 5 s, {used} pages in use < half of {pages}: back")
        return Proposal(plan, state)


def main() -> None:
    """Print what the policy wants while 12 sequences wait, from 5 s to 15 s."""
    chain = block_chain("bfloat16", ["bfloat16"] * 4, "bfloat16")
    plan = parallel_plan(chain, kv_pages=101, tp=1, pp=1, dp=1, devices=1)
    instance = plan.instance("0")
    layers = {(f"layers.{n}", name): size for n in range(4) for name, size in {"bfloat16": 200, "int8": 100}.items()}
    sizes = SizeTable(layers, fixed={"embed": 1000}, pages={"layers.0": 10})  # bytes
    resources = Resources(2800, sizes, min_pages=17, max_pages=1000, copy_rate=1e9)
    policy, smoother = BusyInt8(resources, (2, 1, 3, 0)), Smoother(window=5.0)
    state = policy.init(instance)
    for second in range(30):
        queue = 12 if 5 <= second < 15 else 0
        snapshot = Snapshot(
            time=float(second),
            num_waiting=queue,
            kv_pages_total=instance.kv_pages - 1,
            kv_pages_used=4 * queue,
        )
        proposal = policy.update(smoother.observe(snapshot), instance, state)
        instance, state = proposal.plan, proposal.state  # in a server, the actuator carries the plan out
        if proposal.reason:
            plan = plan.with_instance(instance)
            print(f"after {second} s: {proposal.reason}", *Table(*plan_rows(plan)).lines(), "", sep="\n")


if __name__ == "__main__":
    main()
