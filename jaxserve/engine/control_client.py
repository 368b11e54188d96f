"""ControlClient: all that the server and the command line see of an engine's control plane. Imports no JAX."""

from typing import Any, Protocol


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
