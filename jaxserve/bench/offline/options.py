"""What the offline measurements are asked for. Imports no JAX."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.core.config import EngineConfig

# Columns that say what a row is about; the others are what was measured.
COORDINATES = frozenset({"front", "cache", "part", "batch", "input_len", "output_len", "num_prompts", "repeats"})

Row = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class LatencyOptions:
    """Batches of equal prompts, each run from its arrival to its last token: every batch with every prompt length."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    batches: tuple[int, ...] = (1, 8, 32)
    input_lens: tuple[int, ...] = (128,)
    output_len: int = 128
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True)
class ThroughputOptions:
    """Many requests at once, to their end; without samples `num_prompts` random prompts of `input_len` tokens."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    num_prompts: int = 100
    input_len: int = 512
    output_len: int = 128
    num_warmups: int = 1  # requests run before, and not measured
    ignore_eos: bool = True  # of samples too: answers have the length that was asked for
    detokenize: bool = True
    seed: int = 0


@dataclass(frozen=True)
class StartupOptions:
    """Fresh processes, with an empty compilation cache and with the one they have left behind."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    repeats: int = 1
    server: bool = True  # also `jaxserve serve`, until it is ready and its first token has arrived
    timeout_s: float = 600.0


@dataclass(frozen=True)
class CalibrationOptions:
    """What a file of configs/hardware is measured with."""

    name: str  # of the hardware
    engine: EngineConfig = field(default_factory=EngineConfig)
    precisions: tuple[str, ...] = ("auto",)  # of the layers, each with a server of its own
    seconds: float = 75.0  # of load, for each precision
    seed: int = 0


def plain(config: EngineConfig) -> dict[str, Any]:
    """What differs from the defaults, as JSON: as `jaxserve serve --config` takes it."""
    default = asdict(EngineConfig())
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
        if value != default[name]
    }
