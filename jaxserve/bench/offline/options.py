"""Options of the offline measurements."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.core.config import EngineConfig

# Columns that identify a measurement; all other columns are measured.
COORDINATES = frozenset({"front", "cache", "part", "batch", "input_len", "output_len", "num_prompts", "repeats"})

Row = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class LatencyOptions:
    """Options of `latency`: batches of equal prompts, measured for every batch size with every prompt length."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    batches: tuple[int, ...] = (1, 8, 32)
    input_lens: tuple[int, ...] = (128,)
    output_len: int = 128
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True)
class ThroughputOptions:
    """Options of `throughput`: many requests at once, by default `num_prompts` random prompts of `input_len` tokens."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    num_prompts: int = 100
    input_len: int = 512
    output_len: int = 128
    num_warmups: int = 1  # unmeasured requests that run first
    ignore_eos: bool = True  # generate every answer, also of samples, to its full length
    detokenize: bool = True
    seed: int = 0


@dataclass(frozen=True)
class StartupOptions:
    """Options of `startup`: fresh processes, with an empty and with a filled compilation cache."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    repeats: int = 1
    server: bool = True  # also measure `jaxserve serve`, until its first token has arrived
    timeout_s: float = 600.0


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of the measurement that makes a file of configs/hardware."""

    name: str  # of the hardware
    engine: EngineConfig = field(default_factory=EngineConfig)
    precisions: tuple[str, ...] = ("auto",)  # of the layers; each is measured on its own server
    seconds: float = 75.0  # of load for each precision
    seed: int = 0


def changed_fields(config: EngineConfig) -> dict[str, Any]:
    """Return the fields that differ from their defaults, in JSON types, as `jaxserve serve --config` reads them."""
    default = asdict(EngineConfig())
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
        if value != default[name]
    }
