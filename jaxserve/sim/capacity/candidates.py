"""Candidates: the ways to run one instance of a model on some hardware, before their number is chosen."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.control.policies import precisions_of
from jaxserve.core.errors import ConfigError, MemoryBudgetError
from jaxserve.core.precision import BITS, parse_precision
from jaxserve.planning.spec import STATIC
from jaxserve.sim.capacity.objectives import Objective, strictest
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.options import ClusterOptions
from jaxserve.sim.run import cluster_of

MS = 1e3
MERGES = "tp_transform"  # the policy whose instances merge
HOST = 8  # devices that merged instances may span


@dataclass(frozen=True)
class Candidate:
    """A way to run an instance: its hardware, degrees, precision (None: full) and policy."""

    hardware: str
    tp: int
    pp: int
    precision: str | None
    policy: str

    @property
    def devices(self) -> int:
        """The devices of an instance."""
        return self.tp * self.pp

    @property
    def hardware_name(self) -> str:
        """The name of the hardware, also if it is given as a file."""
        return Path(self.hardware).stem

    def __str__(self) -> str:
        degrees = f"tp {self.tp}" + (f", pp {self.pp}" if self.pp > 1 else "")
        policy = "" if self.policy == STATIC else f", {self.policy}"
        return f"{self.hardware_name}, {degrees}, {self.precision or 'full precision'}{policy}"

    def options(
        self, base: ClusterOptions, objectives: Sequence[Objective], instances: int, floor: float
    ) -> ClusterOptions:
        """Return the options of a cluster of so many instances.

        Policies are told the objectives for TTFT and TPOT and the `floor` of quality.
        """
        changed = replace(
            base,
            hardware=self.hardware,
            cluster=str(instances * self.devices),
            tp=self.tp,
            pp=self.pp,
            precision=self.precision,
            policy=None if self.policy == STATIC else self.policy,
            max_tp=self._max_tp(instances) if MERGES in self.policy else None,
            max_quality_loss=None,
        )
        if not precisions_of(self.policy):
            return changed
        limits = {name: limit / MS for name, limit in strictest(objectives).items()}
        return replace(changed, slo_ttft=limits.get("ttft"), slo_tpot=limits.get("tpot"), max_quality_loss=floor)

    def _max_tp(self, instances: int) -> int:
        """Return the largest degree that instances may merge to, within a host of `HOST` devices."""
        return self.tp << max(min(instances, HOST // self.devices).bit_length() - 1, 0)


@dataclass(frozen=True)
class Rejection:
    """A candidate, or several in words, and why it is not in the answer."""

    what: str
    reason: str


@dataclass(frozen=True)
class Fitting:
    """A candidate whose instance fits on its devices, as a cluster of one."""

    candidate: Candidate
    cluster: Cluster


@dataclass(frozen=True)
class Candidates:
    """The choices that all candidates have in common."""

    base: ClusterOptions
    objectives: tuple[Objective, ...]
    precisions: tuple[str | None, ...]
    policies: tuple[str, ...]
    floor: float
    prefix_caching: bool

    def on(self, hardware: str, max_devices: int) -> Iterator[Fitting | Rejection]:
        """Yield the candidates on some hardware that fit there, and why others do not.

        There are several pipeline stages only where tensor parallelism alone does not fit. An instance stays in one
        host. Policies that change layers begin in full precision.
        """
        most = min(load_hardware(hardware).devices_per_host, max_devices)
        for precision in self.precisions:
            for policy in self.policies:
                if precision is None or not precisions_of(policy):
                    yield from self._of_precision(hardware, most, precision, policy)

    def _of_precision(
        self, hardware: str, most: int, precision: str | None, policy: str
    ) -> Iterator[Fitting | Rejection]:
        for tp in _powers(most):
            last: Rejection | None = None
            for pp in _powers(most // tp):
                found = self.fitting(Candidate(hardware, tp, pp, precision, policy))
                if isinstance(found, Fitting):
                    yield found
                    break
                last = last or found
            else:
                assert last is not None
                yield last

    def fitting(self, candidate: Candidate) -> Fitting | Rejection:
        """Return an instance of a candidate, or why it does not fit."""
        options = candidate.options(self.base, self.objectives, 1, self.floor)
        try:
            cluster = cluster_of(options, prefix_caching=self.prefix_caching)
            cluster.true_costs.of(cluster.memory.plan.instances[0])  # raises if a precision or a link is missing
            for precision in cluster.memory.variants:
                cluster.hardware.curve(precision)  # raises if it is missing
        except MemoryBudgetError as error:
            return Rejection(str(candidate), _memory_text(str(error)))
        except ConfigError as error:
            return Rejection(str(candidate), str(error))
        return Fitting(candidate, cluster)


def chosen_precisions(
    names: Sequence[str], dtype: str, loss: Mapping[str, float], floor: float
) -> tuple[tuple[str | None, ...], list[Rejection]]:
    """Return the precisions (None: full) whose expected loss of quality is within the floor, and the others.

    `loss` has the rise of the cross-entropy for each quantised precision, as a share. Raise `ConfigError` if a name is
    unknown.
    """
    found: list[str | None] = []
    rejected: list[Rejection] = []
    for name in names:
        precision = parse_precision(name, dtype, "precisions")
        if precision not in BITS:
            found.append(None)
        elif loss[precision] <= floor:
            found.append(precision)
        else:
            reason = f"is expected to lose {loss[precision]:.0%} of quality, more than {floor:.0%} (--max-quality-loss)"
            rejected.append(Rejection(f"{precision} on all hardware", reason))
    return tuple(dict.fromkeys(found)), rejected


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _memory_text(message: str) -> str:
    """Return the part of a message about memory that says what is needed, without advice."""
    needs = re.match(r".*: weights [^:(]*\d", message)
    return needs[0] if needs else message
