"""The quality that the bundled model loses in fewer bits, by method: cross-entropy on unseen text.

    python -m bench.quantization [--methods rtn,awq,gptq] [--precisions int8,int4,int3] [--zero-points] [--tokens N]
    python -m bench.quantization --kv-cache
    python -m bench.quantization --served

Calibration text: modules of the standard library on the training side of the split. Held-out text: documents used
neither for training nor for calibration. Every method is calibrated on the same tokens.

With --kv-cache the engine reads the text in the model's own dtype and with a KV cache in fewer bits. With --served the
engine reads the text with layers rounded to the nearest, once by the fastest kernels and once by XLA. XLA does not
round activations, so the difference is what the kernels lose.
"""

import argparse
import hashlib
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.train.corpus import Document, collect, default_stdlib, split
from checkpoints.train.objective import build, token_losses
from jaxserve import LLM, SamplingParams
from jaxserve.calibration.pipeline import METHODS, QuantizationSettings
from jaxserve.calibration.run import CalibrationText, run
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.variants import VariantStore
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import KVCacheDType, ModelConfig
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.quantization import QArray

HELD_OUT = 0.02  # share of the documents, as in training
LENGTH = 512
CALIBRATION_DOCUMENTS = 200
BATCH = 8


def main() -> None:
    """Print nats per token in full precision, and what each method adds."""
    options = _options()
    model = bundled_model_path()
    calibration, held_out = texts()
    rows = _rows(Tokenizer.load(model), held_out)[: options.tokens // LENGTH]
    print(f"{rows.shape[0] * LENGTH} held-out tokens, sha256 {hashlib.sha256(rows.tobytes()).hexdigest()[:12]}")
    if options.kv_cache:
        report_kv_cache(rows)
    elif options.served:
        report_served(rows, options.precisions.split(","))
    else:
        report_weights(options, model, rows, calibration)


def report_weights(options: argparse.Namespace, model: Path, rows: np.ndarray, calibration: list[Document]) -> None:
    """Print the loss of each method and precision of the weights."""
    loss = Loss(open_checkpoint(model, dtype="float32"), rows)
    full = loss({})
    print(f"full precision: {full:.4f} nats per token")
    print("| precision | method | nats per token | lost | seconds to quantise |")
    print("| --- | --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "calibration.txt")
        file.write_text("\n\n".join(document.text for document in calibration), encoding="utf-8")
        for precision in options.precisions.split(","):
            for method in options.methods.split(","):
                began = time.perf_counter()
                settings = QuantizationSettings((precision,), method, options.group, symmetric=not options.zero_points)
                store = run(model, settings, CalibrationText(file, options.samples, LENGTH), Path(folder, method)).store
                took = time.perf_counter() - began
                found = loss(dequantized(store, precision))
                print(f"| {precision} | {method} | {found:.4f} | {found - full:+.4f} | {took:.0f} |", flush=True)


def report_kv_cache(rows: np.ndarray) -> None:
    """Print the loss of KV caches in fewer bits."""
    print("| KV cache | nats per token | lost |")
    print("| --- | ---: | ---: |")
    full = None
    for dtype in get_args(KVCacheDType):
        with LLM(kv_cache_dtype=dtype, max_model_len=LENGTH + 2, max_num_seqs=BATCH, prefix_caching=False) as llm:
            found = served_loss(llm, rows)
        full = found if full is None else full
        print(f"| {dtype} | {found:.5f} | {found - full:+.5f} |", flush=True)


def report_served(rows: np.ndarray, precisions: list[str]) -> None:
    """Print the loss of the engine's kernels and that of XLA's products."""
    print("| precision | by the kernels, nats per token | by XLA | difference |")
    print("| --- | ---: | ---: | ---: |")
    for precision in ("auto", *precisions):
        found = {}
        for backend in ("auto", "xla"):
            options = {"precision": precision, "kernel_backend": backend, "prefix_caching": False}
            with LLM(max_model_len=LENGTH + 2, max_num_seqs=BATCH, **options) as llm:
                found[backend] = served_loss(llm, rows)
        difference = found["auto"] - found["xla"]
        print(f"| {precision} | {found['auto']:.5f} | {found['xla']:.5f} | {difference:+.5f} |", flush=True)


def served_loss(llm: LLM, rows: np.ndarray) -> float:
    """Return the mean negative log likelihood of rows int32 [N, length + 1], given to an engine as prompts."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(rows.tolist(), params, use_tqdm=False)
    losses = [
        -entry[token].logprob
        for output in outputs
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return float(np.mean(losses))


def texts() -> tuple[list[Document], list[Document]]:
    """Return calibration and held-out documents of this interpreter's standard library."""
    train, held_out = split(collect([default_stdlib()]), HELD_OUT)
    return random.Random(0).sample(train, CALIBRATION_DOCUMENTS), held_out


def dequantized(store: VariantStore, precision: str) -> dict[str, np.ndarray]:
    """Return all layers' parameters in float32, dequantised, by block and path."""
    return {
        f"layers.{index}.{name}": np.asarray(leaf.dequantize() if isinstance(leaf, QArray) else leaf, np.float32)
        for index in range(store.num_layers)
        for name, leaf in store.layer(index, precision).items()
    }


class Loss:
    """The mean negative log likelihood of rows int32 [N, length + 1], in float32, with some parameters replaced."""

    def __init__(self, checkpoint: Checkpoint, rows: np.ndarray):
        self.rows = rows[: len(rows) // BATCH * BATCH].reshape(-1, BATCH, rows.shape[1])
        config = checkpoint.config
        self.graph, params = build(config, 0)
        self.flat = nnx.to_flat_state(params)
        self.full = {f"{b}.{name}": x for b in config.block_ids for name, x in checkpoint.block(b).items()}
        self.losses = jax.jit(partial(_mean_loss, config, self.graph))

    def __call__(self, replaced: dict[str, np.ndarray]) -> float:
        arrays = self.full | replaced
        leaves = [
            (path, leaf.replace(jnp.asarray(arrays[".".join(path)]).reshape(leaf.shape))) for path, leaf in self.flat
        ]
        params = nnx.from_flat_state(leaves)
        return float(np.mean([self.losses(params, rows) for rows in self.rows]))


def _mean_loss(config: ModelConfig, graph: nnx.GraphDef, params: nnx.State, rows: jax.Array) -> jax.Array:
    return token_losses(config, graph, params, rows).mean()


def _rows(tokenizer: Tokenizer, documents: list[Document]) -> np.ndarray:
    """Return sequences of LENGTH tokens with their targets, int32 [N, LENGTH + 1]."""
    stream = np.concatenate([np.asarray(tokenizer.encode(document.text), np.int32) for document in documents])
    starts = np.arange((len(stream) - 1) // LENGTH)[:, None] * LENGTH
    return stream[starts + np.arange(LENGTH + 1)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", default="int8,int4,int3")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--samples", type=int, default=64, help="calibration pieces of 512 tokens")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of held-out text")
    parser.add_argument("--zero-points", action="store_true")
    parser.add_argument("--kv-cache", action="store_true", help="measure KV caches instead of weights")
    parser.add_argument("--served", action="store_true", help="measure the engine with its kernels and with XLA's")
    return parser.parse_args()


if __name__ == "__main__":
    main()
