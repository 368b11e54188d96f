"""What the operators' routes take and give. Engines may tell more of themselves than is named here."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class AdminResponse(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="allow")


class PlannedBlock(AdminResponse):
    """A block ("embed", "layers.0", ..., "head") and the precision in which it runs."""

    block: str
    precision: str


class PlanDocument(AdminResponse):
    """A plan, with the keys of its YAML."""

    version: int
    instances: list[dict]


class Pages(AdminResponse):
    """KV pages over all instances."""

    used: int
    total: int
    most: int


class Status(AdminResponse):
    """The engine now. Bytes and seconds."""

    time: float  # of the engine's clock, which all times here are of
    policy: str
    policies: list[str] = []  # what `PUT /admin/policy` takes
    plan_version: int
    target_version: int | None = None  # of the plan that is being reached
    busy: bool
    note: str = ""  # what the policy waits for
    budget: int
    ledger: dict[str, int]
    layers: list[list[PlannedBlock]]  # per instance
    kv_pages: Pages
    snapshot: dict
    slo_ttft: float | None = None


class Ledger(AdminResponse):
    """Every resident byte by name, against the budget."""

    budget: int
    used: int
    free: int
    entries: dict[str, int]


class Decision(AdminResponse):
    """What a policy wanted and what became of it; or, without transitions, an operator's change of policy."""

    time: float
    policy: str
    reason: str
    before_version: int
    target_version: int
    transitions: list[str]
    outcome: str  # "started", "done", "failed: ...", "rejected: ..."


class Decisions(AdminResponse):
    """The latest decisions, newest last."""

    decisions: list[Decision]


class Sample(AdminResponse):
    """One second of the history."""

    time: float
    precisions: dict[str, int]  # decoder layers by precision, over all instances
    weight_bytes: int
    kv_used_bytes: int
    kv_free_bytes: int
    kv_rounding_bytes: int = 0  # what pools take beyond their pages
    other_bytes: int = 0  # all else that the ledger has
    budget: int
    waiting: int
    running: int
    ttft_p95: float | None = None
    tpot: float | None = None
    kv_usage: float


class PolicyBody(BaseModel):
    """The policy that is to decide from now on."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    # One of `Status.policies`, letter for letter: a file is there if the server was started with it, and no other is.
    policy: Annotated[str, Field(min_length=1, max_length=4096)]
