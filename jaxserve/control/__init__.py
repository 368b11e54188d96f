"""The control plane: plans, the transitions between them, and the policies that decide which plan is in force."""

from jaxserve.control.ledger import DeviceLedgers, Ledger
from jaxserve.control.plan import BlockPlan, InstancePlan, Plan, PlanInForce, StagePlan, block_chain, parallel_plan
from jaxserve.control.policy import Policy, Proposal, chain
from jaxserve.control.resources import Resources
from jaxserve.control.stage_sizes import SizeTable
from jaxserve.control.transitions import Actuator, LimitSequences, Outcome, ResizeKVPool, SwapPrecision, Transition

__all__ = [
    "Actuator",
    "BlockPlan",
    "DeviceLedgers",
    "InstancePlan",
    "Ledger",
    "LimitSequences",
    "Outcome",
    "Plan",
    "PlanInForce",
    "Policy",
    "Proposal",
    "ResizeKVPool",
    "Resources",
    "SizeTable",
    "StagePlan",
    "SwapPrecision",
    "Transition",
    "block_chain",
    "chain",
    "parallel_plan",
]
