"""The models that adaptation is measured on, and the sizes that each is served with."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.morph_parts.prepared import ensure_prepared
from bench.morph_parts.systems import Setup
from bench.morph_parts.traffic import Prompts, RequestLengths
from bench.peers.checkpoints import VOCAB, Shape, ensure_checkpoint, ensure_configuration
from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer

BUNDLED = "bundled"
SPECIAL = 2  # token ids at the start of a random model's vocabulary that stand for no text


@dataclass(frozen=True)
class Preset:
    """The sizes with which a model is served, such that KV pages are short in full precision."""

    kv_pages: int
    max_model_len: int
    max_num_seqs: int
    lengths: RequestLengths  # of requests that follow a trace
    fixed_lengths: tuple[int, int]  # prompt and answer of requests that all have one length
    at_once: int  # number of simultaneous requests that saturates the engine
    steady_tokens: int = 1800  # per answer while the cost of plan changes is measured
    exchange_seconds: float = 30.0  # for measuring the cost of plan changes
    prefill_tokens: int = 256  # per step
    shape: Shape | None = None  # of weights that each server makes for itself; None: there is a checkpoint
    one_server_each: bool = False  # a system serves all rates on one server, because a start takes long


# The pages of the first two are a third of their layers' bytes. Those of the 8B are what a device of 24 GB leaves
# beside its weights, and the lengths are the paper's for that size. The last is for checks of the same code on a CPU.
PRESETS = {
    BUNDLED: Preset(56, 544, 16, RequestLengths(288, 96, 360, 168), (192, 96), 320),
    "160m": Preset(256, 1024, 32, RequestLengths(128, 256, 384, 512), (256, 128), 64),
    "8b": Preset(
        *(4096, 1600, 128, RequestLengths(768, 256, 1024, 512), (1024, 512), 192),
        exchange_seconds=60.0,
        prefill_tokens=2048,
        shape=Shape(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocab=128256),
        one_server_each=True,
    ),
    "tiny": Preset(
        *(24, 128, 16, RequestLengths(32, 16, 64, 48), (32, 16), 64),
        steady_tokens=90,
        prefill_tokens=64,
        shape=Shape(hidden=64, layers=3, heads=4, kv_heads=2, intermediate=96),
        one_server_each=True,
    ),
}


def setup_of(name: str, cache: Path, *, awq: bool, slo_ttft: float, kv_pages: int | None = None) -> Setup:
    """Return a model with its sizes, after writing or quantising what is missing under `cache`.

    With `awq`, layers in fewer bits come from variants that AWQ prepared. Without it, and for weights that each server
    makes for itself, they are rounded to the nearest. `kv_pages` replaces the preset's.
    """
    preset = PRESETS[name]
    if preset.shape:
        model = ensure_configuration(f"{name}-{preset.shape.hidden}x{preset.shape.layers}", cache, preset.shape)
    else:
        model = bundled_model_path() if name == BUNDLED else ensure_checkpoint(name, cache)
        if awq:
            pieces = 64 if name == BUNDLED else 8  # random weights have nothing to lose
            model = ensure_prepared(model, cache / "awq", pieces=pieces)
    return Setup(
        model,
        kv_pages or preset.kv_pages,
        preset.max_model_len,
        preset.max_num_seqs,
        preset.prefill_tokens,
        slo_ttft,
        load_format="dummy" if preset.shape else "auto",
    )


def prompts_of(name: str, model: Path) -> Prompts:
    """Return text that the bundled model has not seen, or random tokens for random weights."""
    if name != BUNDLED:
        rng = np.random.default_rng(0)
        return Prompts(rng.integers(SPECIAL, VOCAB, 100_000).tolist(), "random token ids")
    from bench.quantization import texts  # reads the standard library

    _, held_out = texts()
    tokens = Tokenizer.load(model).encode("\n\n".join(document.text for document in held_out))
    return Prompts(tokens, "modules of the standard library that were held out from training")
