"""The compared systems: one engine and one memory budget, used in several ways."""

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from jaxserve.control.policies.loading import MORPH_MODES
from jaxserve.core.config import EngineConfig
from jaxserve.planning.resolve import Resolved, resolve

FULL, INT4, ACCURACY, INT8, PERFORMANCE = "full", "int4", "morph", "morph-int8", "morph-performance"
NAMES = (FULL, INT4, ACCURACY, INT8, PERFORMANCE)
ADAPTING = (ACCURACY, INT8, PERFORMANCE)
LABELS = {
    FULL: "full precision",
    INT4: "static int4",
    ACCURACY: "morph, accuracy",
    INT8: "morph, int8",
    PERFORMANCE: "morph, performance",
}
QUANTISED = "int4"  # of the quantised static engine
MAX_QUEUED = 100_000  # requests: none is refused, so that all that wait are measured
# The mode of morph whose precisions a system's layers take.
MODES = dict.fromkeys(NAMES, PERFORMANCE) | {ACCURACY: ACCURACY, INT8: INT8}


def swap_precisions(name: str, num_layers: int) -> tuple[str, ...]:
    """Return the lowest precisions that a system gives to its layers, by place in the swap order."""
    settings = MORPH_MODES[MODES[name]]
    found = (settings.precision_at(place, num_layers) for place in range(num_layers))
    return tuple(precision for precision in found if precision)


@dataclass(frozen=True)
class Setup:
    """A model and the sizes that it is served with."""

    model: Path
    kv_pages: int  # of the static engine in full precision
    max_model_len: int
    max_num_seqs: int
    prefill_tokens: int = 256  # per step
    slo_ttft: float = 2.0  # s
    load_format: Literal["auto", "dummy"] = "auto"

    @property
    def name(self) -> str:
        return self.model.name


@dataclass(frozen=True)
class Envelope:
    """The sizes of the parts of a system's memory budget."""

    page_bytes: int  # of one page in all layers
    full_layers_bytes: int  # all layers in full precision
    quantized_layers_bytes: int  # all layers in the lowest precisions that the system uses
    swap_buffer_bytes: int  # room for one more variant of a layer during a swap
    full_precision: str  # as the engine and its metrics name it
    num_layers: int


@dataclass(frozen=True)
class System:
    """One way to use the budget."""

    name: str
    kv_pages: int  # at the start
    serve_args: tuple[str, ...]

    @property
    def label(self) -> str:
        return LABELS[self.name]


def envelope(setup: Setup, name: str = INT4) -> Envelope:
    """Return the envelope of a system, from the checkpoint's headers alone.

    Raise ConfigError for sizes that do not fit together.
    """
    resolved = _resolved(setup, name, setup.kv_pages)
    (stage,) = resolved.plan.instances[0].stages
    full, layers = resolved.padded_model.dtype, resolved.padded_model.num_layers

    def layers_in(precisions: tuple[str, ...]) -> int:
        named = enumerate((*precisions, *[full] * (layers - len(precisions))))
        return sum(resolved.layer_bytes[f"layers.{layer}", precision] for layer, precision in named)

    return Envelope(
        resolved.limits.page_bytes(stage),
        layers_in(()),
        layers_in(swap_precisions(name, layers)),
        resolved.limits.stage_entries(stage).get("exchange", 0),
        full,
        layers,
    )


def _resolved(setup: Setup, name: str, kv_pages: int, max_kv_pages: int | None = None) -> Resolved:
    """Return what a server with the system's policy would resolve to."""
    return resolve(
        EngineConfig(
            model=setup.model,
            load_format=setup.load_format,
            policy=MODES[name],
            kv_pages=kv_pages,
            max_kv_pages=max_kv_pages,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_seqs + setup.prefill_tokens,
        )
    )


def planned(setup: Setup) -> tuple[Envelope, dict[str, System]]:
    """Return the envelope of static int4 and all systems, computed in a process of its own.

    JAX takes the memory of an accelerator until its process ends, and the servers need that memory.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_planned, setup).result()


def _planned(setup: Setup) -> tuple[Envelope, dict[str, System]]:
    room = envelope(setup)
    return room, systems(setup, room)


def systems(setup: Setup, room: Envelope) -> dict[str, System]:
    """Return all systems by name; `room` is the envelope of static int4.

    The budget is that of `setup.kv_pages` pages and the layers in full precision. Heads stay in full precision.

    Where layers are copied, an adapting system reserves room for one quantised layer next to the layer in use, and the
    static engines use that room for pages. An adapting system also keeps all quantised layers in host memory, in each
    precision that it uses. That memory is not part of the budget. Where the host is the device, static engines have as
    much memory and leave it unused.

    Every system reserves addresses for as many pages as a static engine would have with its lowest precisions (static
    full precision: with those of static int4), so that no system ever has more pages than that.
    """
    quantised = ("--precision", QUANTISED, "--head-precision", room.full_precision)
    static = {
        FULL: _system(setup, FULL, room, setup.kv_pages),
        INT4: _system(setup, INT4, room, _max_pages(setup, room), *quantised),
    }
    return static | {name: _adapting(setup, name) for name in ADAPTING}


def _adapting(setup: Setup, name: str) -> System:
    room = envelope(setup, name)
    return _system(setup, name, room, _first_pages(setup, room), "--policy", name, "--slo-ttft", f"{setup.slo_ttft:g}")


def _system(setup: Setup, name: str, room: Envelope, kv_pages: int, *own: str) -> System:
    max_pages = _max_pages(setup, room)
    common = (
        *(str(setup.model), "--load-format", setup.load_format),
        *("--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)),
        *("--max-num-batched-tokens", str(setup.max_num_seqs + setup.prefill_tokens)),
        *("--max-queued-requests", str(MAX_QUEUED), "--max-queued-tokens", str(MAX_QUEUED * setup.max_model_len)),
        *("--max-kv-pages", str(max_pages), "--memory-gb", f"{(_budget(setup, name, room) + 1) / 1e9:.9f}"),
    )
    return System(name, kv_pages, (*common, "--kv-pages", str(kv_pages), *own))


def _first_pages(setup: Setup, room: Envelope) -> int:
    """Return the pages that an adapting system starts with."""
    return setup.kv_pages - math.ceil(room.swap_buffer_bytes / room.page_bytes)


def _max_pages(setup: Setup, room: Envelope) -> int:
    """Return the pages that fit next to layers in the lowest precisions."""
    return setup.kv_pages + (room.full_layers_bytes - room.quantized_layers_bytes) // room.page_bytes


def _budget(setup: Setup, name: str, room: Envelope) -> int:
    """Return the bytes that an adapting server needs exactly for the pages that it starts with."""
    resolved = _resolved(setup, name, _first_pages(setup, room), _max_pages(setup, room))
    (needed,) = resolved.limits.device_bytes(*resolved.plan.instances).values()
    return needed
