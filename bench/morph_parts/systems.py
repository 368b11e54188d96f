"""The systems that are compared: one engine in one memory budget, used in four ways."""

import math
from dataclasses import dataclass
from pathlib import Path

from jaxserve.core.config import EngineConfig
from jaxserve.resolution import Resolved, resolve

FULL, INT4, ACCURACY, PERFORMANCE = "full", "int4", "morph", "morph-performance"
NAMES = (FULL, INT4, ACCURACY, PERFORMANCE)
LABELS = {
    FULL: "full precision",
    INT4: "static int4",
    ACCURACY: "morph, accuracy",
    PERFORMANCE: "morph, performance",
}
QUANTISED = "int4"


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
    """Where the budget goes, in bytes: a page of all layers, the layers in both forms, room to exchange one of them."""

    page: int
    full_layers: int
    quantised_layers: int
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


def envelope(setup: Setup) -> Envelope:
    """From the checkpoint's headers alone. Raises `ConfigError` for sizes that do not fit together."""
    resolved = _resolved(setup, setup.kv_pages)
    (stage,) = resolved.stages
    full, layers = resolved.physical.dtype, resolved.physical.num_layers

    def layers_in(precision: str) -> int:
        return sum(resolved.layer_bytes[f"layers.{layer}", precision] for layer in range(layers))

    return Envelope(stage.page, layers_in(full), layers_in(QUANTISED), stage.exchange, full, layers)


def _resolved(setup: Setup, kv_pages: int, most: int | None = None) -> Resolved:
    """As a server that morphs would have it."""
    return resolve(
        EngineConfig(
            model=setup.model,
            policy=ACCURACY,
            variants=(QUANTISED,),
            kv_pages=kv_pages,
            max_kv_pages=most,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_seqs + setup.prefill_tokens,
        )
    )


def _budget(setup: Setup, kv_pages: int, most: int) -> int:
    """Bytes that a server which morphs needs for so many pages at the start, and not one more."""
    resolved = _resolved(setup, kv_pages, most)
    (stage,) = resolved.plan.instances[0].stages
    return resolved.resources(copy_rate=1.0).stage_bytes(0, stage)


def systems(setup: Setup, room: Envelope) -> dict[str, System]:
    """All of them, by name, in the budget of `setup.kv_pages` pages beside the layers in full precision.

    Where layers are copied, what changes them keeps room for one in int4 beside the one in use; the static engines use
    that room for pages. (It also keeps all layers in int4 in memory of the host, which is none of the budget: where the
    host is the device, static engines have as much and leave it unused.) All reserve addresses for the same number of
    pages, that of static int4, so that all run the same executables and none has more. The heads stay in full
    precision.
    """
    freed = (room.full_layers - room.quantised_layers) // room.page
    morph = setup.kv_pages - math.ceil(room.exchange / room.page)
    pages = {FULL: setup.kv_pages, INT4: setup.kv_pages + freed, ACCURACY: morph, PERFORMANCE: morph}
    common = (
        *(str(setup.model), "--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)),
        *("--max-num-batched-tokens", str(setup.max_num_seqs + setup.prefill_tokens)),
        *("--max-kv-pages", str(pages[INT4])),
        *("--memory-gb", f"{(_budget(setup, morph, pages[INT4]) + 1) / 1e9:.9f}"),
    )
    morphing = ("--variant", QUANTISED, "--slo-ttft", f"{setup.slo_ttft:g}")
    own = {
        FULL: (),
        INT4: ("--precision", QUANTISED, "--head-precision", room.full_precision),
        ACCURACY: ("--policy", ACCURACY, *morphing),
        PERFORMANCE: ("--policy", PERFORMANCE, *morphing),
    }
    return {name: System(name, pages[name], (*common, "--kv-pages", str(pages[name]), *own[name])) for name in NAMES}
