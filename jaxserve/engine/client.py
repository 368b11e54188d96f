"""The client interface of an engine: everything that the server or another front end may use."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxserve.core.request import RequestOutput, TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.telemetry import ControlState, HttpFigures, Snapshot, WaitingRoom


class ControlClient(Protocol):
    """The interface that shows and changes the plan of a running engine.

    Methods that return something are called from the asyncio loop and do not block. Results are plain data for JSON,
    with bytes and seconds as numbers. All times are seconds of the clock that `status()["time"]` shows.
    """

    def plan_yaml(self) -> str:
        """Return the plan in force as YAML that `set_plan` accepts."""
        ...

    def plan_dict(self) -> dict[str, Any]:
        """Return the plan in force as a dict with the keys of its YAML: `version` and `instances`."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the present state of the engine as a dict.

        - `time`: seconds
        - `policy`: the name of the policy; `policies`: the names that `set_policy` accepts
        - `plan_version`; `target_version`: None without a target
        - `busy`: whether a transition is in progress
        - `note`: the condition that the policy waits for, "" for none
        - `budget`: bytes of each device; `ledger`: {name: bytes} of the fullest device, with "weights" and "kv" among
          its names; `devices`: [{"device", "used"}, ...] with the bytes used on each device
        - `num_instances`; `instances`: the names of those that are shown, which are at most 16; `layers`: for each of
          these [{"block", "precision"}, ...]; `precisions`: {precision: decoder layers} of all instances
        - `instance_states`: for each of these {"name", "state", "devices", "tp", "draining", "running", "waiting",
          "kv_usage"}, with the state "serving", "draining", "exchanging" or "failed"
        - `waiting_room`: {"requests", "tokens", "longest_tokens", "oldest_seconds"} of those that no instance can hold
        - `kv_pages`: {"used", "total", "most"} over all instances
        - `snapshot`: the numbers of the latest snapshot
        - `quality`: {"loss", "nats", "floor", "measured"}: what the plan is expected to cost, as in `telemetry.Quality`
        - `slo_ttft` and `slo_tpot`: seconds; `max_quality_loss`: a share of the cross-entropy; None for a policy
          without this objective
        """
        ...

    def policy_in_force(self) -> dict[str, Any]:
        """Return the policy that decides.

        - `policy`: its name; `source`: its name or file as it was given
        - `settings`: the values in force, None for infinity; {} for a policy without settings
        - `objectives`: `slo_ttft`, `slo_tpot` and `max_quality_loss` as in the status
        """
        ...

    def state(self) -> ControlState:
        """Return the KV capacity of each instance under the policy that decides, and the decisions that have ended."""
        ...

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """Return the last `limit` decisions, newest last.

        Each has `time`, `policy`, `reason`, `before_version`, `target_version`, `transitions` (lines of text) and
        `outcome`: "started", "done", "failed: ..." or "rejected: ...". A change by an operator has the outcome "done",
        no transitions, and the policy that decides from then on.
        """
        ...

    def history(self, since: float = float("-inf")) -> list[dict[str, Any]]:
        """Return one sample per second of the last 15 minutes after the time `since`, newest last.

        Each has `time`, `precisions` ({precision: decoder layers}), `weight_bytes`, `kv_used_bytes`, `kv_free_bytes`,
        `kv_rounding_bytes` (bytes of the pools without a page), `other_bytes`, `budget`, `waiting`, `waiting_room`,
        `running`, `prompt_tokens_per_s`, `generated_tokens_per_s`, `ttft_p95` (s, or None), `tpot` (s, or None) and
        `kv_usage` (0 to 1). Bytes are sums over all devices. On one device, the fields whose names end in `_bytes` add
        up to its ledger.
        """
        ...

    def set_policy(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        """Let another policy decide from the next tick on. It goes on from the plan in force.

        `name` may come from a client, because it is only looked up. `settings` are those that differ from the policy's
        own; None as a value means infinity. Raise `RequestError` if `name` is not in `status()["policies"]`, if a
        setting is not valid, or if layers cannot have the precisions that the policy needs.
        """
        ...

    def set_plan(self, yaml_text: str) -> None:
        """Switch to the policy `manual` with a plan as its target.

        Raise `RequestError` or `PlanError` if the plan is malformed, cannot be reached, or exceeds the budget.
        """
        ...

    def edit_plan(
        self,
        action: str,
        instances: Sequence[str] = (),
        *,
        into: int | None = None,
        devices: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Switch to the policy `manual` with a change of the set of instances as its target, and return this plan.

        `action` is "merge" (two or more `instances`, given by their names), "split" (one of them, into `into`
        instances, by default 2), "remove", "drain" or "undrain" (one or more), or "add" (on `devices`, by default the
        first free ones). Raise `PlanError` if it is impossible, or if the instances are changing already.
        """
        ...


@dataclass(frozen=True)
class TextPrompt:
    """A prompt to be tokenized by the engine, with special tokens such as bos if `add_special_tokens`."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class TokensPrompt:
    """A prompt as token ids. `text`, if known, is only copied to `RequestOutput.prompt`."""

    token_ids: tuple[int, ...]
    text: str | None = None


Prompt = TextPrompt | TokensPrompt


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the served model, and the limits on one request."""

    name: str
    max_model_len: int  # tokens of prompt and answer together, under the best plan that may come into force
    vocab_size: int
    hidden_size: int
    created: int  # seconds since the epoch
    max_n: int = 64
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # see `generation_config`
    max_new_tokens: int | None = None  # see `generation_config`; limits every answer over HTTP
    merged_len: int | None = None  # tokens that an instance of the largest degree can hold, whatever the policy
    instance_len: int | None = None  # tokens that an instance can hold now, if known; at most `max_model_len`


@dataclass(frozen=True)
class InstanceState:
    """An instance after its latest step."""

    name: str
    engine: int  # its number among the present instances: the label `engine` of its metrics
    snapshot: Snapshot


class EngineClient(Protocol):
    """The interface of an engine that serves one model. Its methods are called from one asyncio loop."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def ready(self) -> bool:
        """True if requests are accepted: the engine is loaded, warm, and neither draining nor stopped."""
        ...

    @property
    def control(self) -> ControlClient | None:
        """The interface to the plan, or None for an engine whose plan cannot change."""
        ...

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        stream: bool = True,
        trace: TraceContext | None = None,
        sender: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the new parts of a request's n answers, until an output is `finished`.

        `sender`: the client for whom new grammars are compiled, in turns with others; "": one that sends nothing else.
        Without `stream`, each answer is yielded once, when it has ended. If `prompt_logprobs` were requested, the first
        output of a stream has them, or without `stream` the last one. Closing the generator, or cancelling the task
        that waits for it, aborts the request and frees its pages.

        Before the first output, raise `RequestError` (a limit is exceeded), `QueueFull` or `EngineStopped` (draining or
        stopped). At any time, raise `EngineFailed` or `EngineStopped` (shut down before the end).
        """
        ...

    async def embed(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        trace: TraceContext | None = None,
    ) -> RequestOutput:
        """Return an output whose `embedding` is the pooled last hidden state, float32 [hidden_size], of unit length.

        Cancelling the task aborts the request. Raise the errors of `generate`.
        """
        ...

    def instances(self) -> Sequence[InstanceState]:
        """Return the present instances."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the sum of the instances' states after their latest steps."""
        ...

    def waiting_room(self) -> WaitingRoom:
        """Return the state of the requests that no instance can hold now."""
        ...

    def check_health(self) -> None:
        """Raise `EngineFailed` if the step loop is dead, or has work and made no progress for too long."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget all prompts in the prefix cache before the next step: requests from now on find none of them.

        Running requests keep their pages, which others cannot find any more.
        """
        ...

    def count_rejection(self, reason: str) -> None:
        """Count a request in the metrics that was refused before it reached the engine, e.g. as "invalid"."""
        ...

    def outcomes(self) -> Mapping[str, Mapping[str, int]]:
        """Return how many requests have `finished` since the start, by reason, and how many were `refused`, by reason.

        The reasons of finished ones are those of `FinishReason`, the others those of the metrics.
        """
        ...

    def metrics_text(self, http: HttpFigures | None = None, *, openmetrics: bool = False) -> bytes:
        """Return the metrics, with those of an HTTP server if they are given. May be called from any thread.

        They are in Prometheus' text format, or in that of OpenMetrics.
        """
        ...

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests, and wait at most `timeout` seconds for those in flight. Return whether all ended.

        `ready` is False from the call on.
        """
        ...

    async def shutdown(self) -> None:
        """End every request in flight with `EngineStopped`, stop the loop and free everything. Idempotent."""
        ...
