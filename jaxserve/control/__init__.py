"""The control plane: plans, and what follows from them. No JAX."""

from jaxserve.control.ledger import Ledger
from jaxserve.control.plan import BlockPlan, InstancePlan, Plan, StagePlan, chain_of, static_plan

__all__ = ["BlockPlan", "InstancePlan", "Ledger", "Plan", "StagePlan", "chain_of", "static_plan"]
