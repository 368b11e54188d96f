"""The systems that are compared: one engine in one memory budget, used in several ways."""

import math
from dataclasses import dataclass
from pathlib import Path

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
QUANTISED = "int4"  # of the static engine
MODES = dict.fromkeys(NAMES, PERFORMANCE) | {ACCURACY: ACCURACY, INT8: INT8}  # whose mixtures a system's layers take


def mixture(name: str, num_layers: int) -> tuple[str, ...]:
    """The precisions that a system's layers get under pressure at most, or are in, by place in the swap order."""
    settings = MORPH_MODES[MODES[name]]
    found = (settings.precision_at(place, num_layers) for place in range(num_layers))
    return tuple(precision for precision in found if precision)


@dataclass(frozen=True)
class Setup:
    """A model and the sizes that it is served with. `kv_pages`: of the static engine in full precision."""

    model: Path
    kv_pages: int
    max_model_len: int
    max_num_seqs: int
    prefill_tokens: int = 256  # of a step
    slo_ttft: float = 2.0  # s

    @property
    def name(self) -> str:
        return self.model.name


@dataclass(frozen=True)
class Envelope:
    """Where the budget goes, in bytes: a page of all layers, the layers in full precision and in the fewest bits that a
    system takes them to, room to exchange one of them.
    """

    page: int
    full_layers: int
    fewest_layers: int
    exchange: int
    full_precision: str  # its name, as the engine and its metrics have it
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
    """A system's, from the checkpoint's headers alone. Raises `ConfigError` for sizes that do not fit together."""
    resolved = _resolved(setup, name, setup.kv_pages)
    (stage,) = resolved.stages
    full, layers = resolved.padded_model.dtype, resolved.padded_model.num_layers

    def layers_in(precisions: tuple[str, ...]) -> int:
        named = enumerate((*precisions, *[full] * (layers - len(precisions))))
        return sum(resolved.layer_bytes[f"layers.{layer}", precision] for layer, precision in named)

    return Envelope(stage.page, layers_in(()), layers_in(mixture(name, layers)), stage.swap_buffer, full, layers)


def _resolved(setup: Setup, name: str, kv_pages: int, most: int | None = None) -> Resolved:
    """As a server that morphs would have it."""
    return resolve(
        EngineConfig(
            model=setup.model,
            policy=MODES[name],
            kv_pages=kv_pages,
            max_kv_pages=most,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_seqs + setup.prefill_tokens,
        )
    )


def systems(setup: Setup, room: Envelope) -> dict[str, System]:
    """All of them, by name, in the budget of `setup.kv_pages` pages beside the layers in full precision. `room` is that
    of static int4.

    Where layers are copied, what changes them keeps room for one in fewer bits beside the one in use; the static
    engines use that room for pages. (It also keeps all layers in fewer bits in memory of the host, in both precisions
    where it takes them to two, which is none of the budget: where the host is the device, static engines have as much
    and leave it unused.) All reserve addresses for as many pages as a static engine has whose layers are in the fewest
    bits that theirs come to, full precision for static int4's, so that none ever has more. The heads stay in full
    precision.
    """
    quantised = ("--precision", QUANTISED, "--head-precision", room.full_precision)
    static = {
        FULL: _system(setup, FULL, room, setup.kv_pages),
        INT4: _system(setup, INT4, room, _most(setup, room), *quantised),
    }
    return static | {name: _adapting(setup, name) for name in ADAPTING}


def _adapting(setup: Setup, name: str) -> System:
    room = envelope(setup, name)
    return _system(setup, name, room, _least(setup, room), "--policy", name, "--slo-ttft", f"{setup.slo_ttft:g}")


def _system(setup: Setup, name: str, room: Envelope, kv_pages: int, *own: str) -> System:
    most = _most(setup, room)
    common = (
        *(str(setup.model), "--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)),
        *("--max-num-batched-tokens", str(setup.max_num_seqs + setup.prefill_tokens)),
        *("--max-kv-pages", str(most), "--memory-gb", f"{(_budget(setup, name, room) + 1) / 1e9:.9f}"),
    )
    return System(name, kv_pages, (*common, "--kv-pages", str(kv_pages), *own))


def _least(setup: Setup, room: Envelope) -> int:
    """Pages that what morphs starts with."""
    return setup.kv_pages - math.ceil(room.exchange / room.page)


def _most(setup: Setup, room: Envelope) -> int:
    """Pages beside layers in the fewest bits."""
    return setup.kv_pages + (room.full_layers - room.fewest_layers) // room.page


def _budget(setup: Setup, name: str, room: Envelope) -> int:
    """Bytes that a server which morphs needs for the pages that it starts with, and not one more."""
    resolved = _resolved(setup, name, _least(setup, room), _most(setup, room))
    (stage,) = resolved.plan.instances[0].stages
    return resolved.resources(copy_rate=1.0).stage_bytes(0, stage)
