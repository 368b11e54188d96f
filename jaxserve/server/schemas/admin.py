"""Bodies and responses of the operators' routes. Engines may add fields that are not declared here."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxserve.core.errors import RequestError
from jaxserve.server.schemas.body import Body, check_fields

MAX_INSTANCES = MAX_DEVICES = 1024  # in one edit of a plan
MAX_INSTANCE_NAME = 64  # characters
MAX_POLICY_NAME = 4096  # characters; it may be the path of a file


class AdminResponse(BaseModel):
    """The base of responses that engines may extend with fields of their own."""

    model_config = ConfigDict(extra="allow")


class PlannedBlock(AdminResponse):
    """A block of the model ("embed", "layers.0", ..., "head") and the precision in which it runs."""

    block: str
    precision: str


class PlanDocument(AdminResponse):
    """A plan with the keys of its YAML form."""

    version: int
    instances: list[dict]


Name = Annotated[str, Field(max_length=MAX_INSTANCE_NAME)]  # of an instance


class PlanEditBody(Body):
    """A change of the set of instances."""

    action: Literal["merge", "split", "drop", "restore", "add", "remove", "drain", "undrain"]
    instances: Annotated[list[Name], Field(default_factory=list, max_length=MAX_INSTANCES)]
    into: Annotated[int, Field(ge=2, le=MAX_INSTANCES)] | None = None  # instances that one is split into; default: 2
    # Of an instance that is added; default: the first free ones.
    devices: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_DEVICES)] | None = None

    def check(self) -> None:
        """Raise RequestError for a field that is unknown, even with --ignore-unknown-fields, or has no effect."""
        check_fields(self.model_extra or {}, self.__class__.model_fields, {}, ())
        for field, action in (("into", "split"), ("devices", "add")):
            if getattr(self, field) is not None and self.action != action:
                raise RequestError(f"{field} has no effect on {self.action!r}: only {action!r} has it", field=field)


class Pages(AdminResponse):
    """Numbers of KV pages over all instances."""

    used: int
    total: int
    most: int


class DeviceUse(AdminResponse):
    """The bytes that the ledger of one device counts."""

    device: int
    used: int


class StageState(AdminResponse):
    """The devices of an instance's stage, and the number of its decoder layers."""

    devices: list[int]
    layers: int


class InstanceState(AdminResponse):
    """An instance: its name, its devices and its load."""

    name: str
    # "failed": others take its place; "exchanging": KV pages of its requests are on their way; "draining"; "serving"
    state: str = "serving"
    devices: list[int]
    tp: int  # degree of tensor parallelism
    stages: list[StageState] = []
    lanes: int = 1  # instances of the start that keep one copy of their layers together in this one
    draining: bool  # new requests go to other instances
    running: int
    held: int = 0  # of these, the ones that go on when KV pages of theirs have come from another device
    waiting: int
    kv_usage: float


class Room(AdminResponse):
    """The requests that no instance can hold now, although one could after a change of the instances."""

    requests: int
    tokens: int
    longest_tokens: int
    oldest_seconds: float


class Quality(AdminResponse):
    """The expected cost of the plan in force: the rise of the cross-entropy over that of full precision."""

    loss: float  # as a share
    nats: float | None = None  # a token; null if it was not measured on this model
    floor: float | None = None  # the largest share that the policy accepts; null if it accepts every one
    measured: bool  # on this model; otherwise it is assumed


class Status(AdminResponse):
    """The current state of the engine, in bytes and in seconds of the engine's clock."""

    time: float
    policy: str
    policies: list[str] = []  # allowed in `PUT /admin/policy`
    plan_version: int
    target_version: int | None = None  # version of the plan that the engine is changing to
    busy: bool
    note: str = ""  # why the policy waits
    budget: int  # of each device
    ledger: dict[str, int]  # of the fullest device
    devices: list[DeviceUse] = []
    num_instances: int = 1
    instances: list[str] = []  # names of the instances in `layers`: if there are many, not all
    instance_states: list[InstanceState] = []  # of the same instances
    waiting_room: Room | None = None
    layers: list[list[PlannedBlock]]
    precisions: dict[str, int] = {}  # decoder layers by precision, over all instances
    kv_pages: Pages
    snapshot: dict
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    max_quality_loss: float | None = None  # share of full precision's cross-entropy
    quality: Quality | None = None


class EditedPlan(AdminResponse):
    """The plan that the engine is changing to, and the state from which it does."""

    wanted: PlanDocument
    status: Status


class Ledger(AdminResponse):
    """The bytes of every ledger entry of the fullest device, and the budget of each device."""

    budget: int
    used: int
    free: int
    entries: dict[str, int]
    devices: list[DeviceUse] = []


class Decision(AdminResponse):
    """A decision of a policy and its outcome. Without transitions it is an operator's change of policy."""

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
    """The state of the engine in one second of the history."""

    time: float
    precisions: dict[str, int]  # decoder layers by precision, over all instances
    weight_bytes: int
    kv_used_bytes: int
    kv_free_bytes: int
    kv_rounding_bytes: int = 0  # bytes of the pools beyond their pages
    other_bytes: int = 0  # bytes of all other ledger entries
    budget: int
    waiting: int
    waiting_room: int = 0  # requests that no instance can hold
    running: int
    prompt_tokens_per_s: float = 0.0  # computed, and not found in the prefix cache
    generated_tokens_per_s: float = 0.0
    ttft_p95: float | None = None
    tpot: float | None = None
    kv_usage: float


class PolicyInForce(AdminResponse):
    """The policy that decides, the values of its settings (null: no limit) and its objectives."""

    policy: str
    source: str  # the name or the file as it was given
    settings: dict[str, Any]
    objectives: dict[str, float | None]


class PolicyBody(Body):
    """The policy that decides from now on."""

    # Must equal an entry of `Status.policies`, so that clients cannot make the server load other policy files.
    policy: Annotated[str, Field(min_length=1, max_length=MAX_POLICY_NAME)]
    # Those that differ from the policy's own, as in a policy file; null: no limit.
    settings: dict[str, float | int | bool | str | None] | None = None

    def check(self) -> None:
        """Raise UnsupportedParameter if there is an unknown field, even with --ignore-unknown-fields."""
        check_fields(self.model_extra or {}, self.__class__.model_fields, {}, ())
