"""EngineClient: all that the server (or any other front) sees of an engine. Imports no JAX."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxserve.core.request import RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.telemetry.snapshot import Snapshot


class ControlClient(Protocol):
    """Shows and steers the plan of a running engine. Called from the asyncio loop: no method blocks.

    What it returns is plain data, ready for JSON, with bytes and seconds as numbers. Times are seconds of one clock:
    that of `status()["time"]`.
    """

    def plan_yaml(self) -> str:
        """The plan in force as YAML; `set_plan` takes what this gives."""
        ...

    def plan_dict(self) -> dict[str, Any]:
        """The plan in force with the keys of its YAML: `version` and `instances`."""
        ...

    def status(self) -> dict[str, Any]:
        """The engine now:

        `time`; `policy` (name), `policies` (the names that `set_policy` takes); `plan_version`; `target_version`,
        None without a target; `busy`: whether a transition is being carried out; `note`: what the policy waits for, ""
        if for nothing; `budget` (bytes) and `ledger` ({name: bytes}, among them "weights" and "kv"); `layers`: per
        instance [{"block", "precision"}, ...]; `kv_pages`: {"used", "total", "most"} over all instances; `snapshot`:
        the numbers of the latest one; `slo_ttft` (s), None if the policy has none.
        """
        ...

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last `limit` decisions, newest last.

        Each has `time`, `policy`, `reason`, `before_version`, `target_version`, `transitions` (lines of text) and
        `outcome`: "started", "done", "failed: ..." or "rejected: ...". What operators change is among them, "done" and
        without transitions, with the policy that decides since then.
        """
        ...

    def history(self, since: float = float("-inf")) -> list[dict[str, Any]]:
        """The last 15 minutes, one sample a second, newest last; only those after the time `since`.

        Each has `time`, `precisions` ({precision: decoder layers}), `weight_bytes`, `kv_used_bytes`, `kv_free_bytes`,
        `kv_rounding_bytes` (what pools take beyond their pages), `other_bytes`, `budget`, `waiting`, `running`,
        `ttft_p95` (s, or None), `tpot` (s, or None) and `kv_usage` (0 to 1). Bytes are the sum over all devices; the
        first five are, where there is one, all that its ledger has.
        """
        ...

    def set_policy(self, name: str) -> None:
        """Lets another policy decide from the next tick on. Mutates.

        Raises RequestError for a name that `status()["policies"]` does not have. `name` may be anything that a client
        has sent: nothing is read or run because of it.
        """
        ...

    def set_plan(self, yaml_text: str) -> None:
        """Makes a plan the manual policy's target and that policy the one that decides. Mutates.

        Raises RequestError or PlanError for one that cannot be read, reached or held within the budget.
        """
        ...


@dataclass(frozen=True)
class TextPrompt:
    """A prompt to be tokenized by the engine. `add_special_tokens`: e.g. the beginning-of-sequence token."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class TokensPrompt:
    """A prompt as token ids. `text`, if known, is only handed through to `RequestOutput.prompt`."""

    token_ids: tuple[int, ...]
    text: str | None = None


Prompt = TextPrompt | TokensPrompt


@dataclass(frozen=True)
class ModelInfo:
    """What a client may know of the served model, and the limits on one request."""

    name: str
    max_model_len: int  # tokens of prompt and answer together
    vocab_size: int
    hidden_size: int
    created: int  # seconds since the epoch
    max_n: int = 64
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # of generation_config.json
    max_new_tokens: int | None = None  # of generation_config.json: no answer over HTTP is longer


class EngineClient(Protocol):
    """An engine that serves one model. Its methods are called from one asyncio loop."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def ready(self) -> bool:
        """Whether requests are accepted: loaded, warm, and neither draining nor stopped."""
        ...

    @property
    def control(self) -> ControlClient | None:
        """What shows and steers the plan; None for an engine whose plan cannot change."""
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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new for one or more of the request's n answers, until `finished`; unless `stream`, an answer
        is told of when it has ended. The last item has `prompt_logprobs`, if asked for.

        Closing the generator, or cancelling the task that waits for it, aborts the request and frees its pages.
        Raises, before the first item: RequestError (a limit is broken), QueueFull, EngineStopped (draining or
        stopped). Raises, at any time: EngineFailed, EngineStopped (shut down before the end).
        """
        ...

    async def embed(
        self, prompt: Prompt, *, request_id: str | None = None, priority: int = 0, salt: str = ""
    ) -> RequestOutput:
        """Returns an output whose `embedding` is the pooled last hidden state, float32[hidden_size], of unit length.

        Raises as `generate`; cancelling the task aborts the request.
        """
        ...

    def snapshot(self) -> Snapshot:
        """The engine's state after its latest step."""
        ...

    def check_health(self) -> None:
        """Raises EngineFailed if the step loop is dead, or has work and made no progress for too long."""
        ...

    def count_rejection(self, reason: str) -> None:
        """Counts in the metrics a request that was refused on the way here, e.g. as "invalid". Mutates."""
        ...

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        ...

    async def drain(self, timeout: float) -> bool:
        """Refuses new requests and waits for those in flight, at most `timeout` seconds. Returns whether all ended.

        Mutates; `ready` is False from the call on.
        """
        ...

    async def shutdown(self) -> None:
        """Ends every request in flight with EngineStopped, stops the loop and frees everything. Idempotent. Mutates."""
        ...
