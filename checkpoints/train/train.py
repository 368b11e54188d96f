"""Train the bundled model on the standard library of the running interpreter, or of other interpreters.

    python checkpoints/train/train.py --out checkpoints/jaxserve-python-6m --minutes 40

The learning rate falls with the used share of the budget, in steps or in minutes, whichever is larger. A run on a busy
machine therefore ends on time and with a learning rate of 0.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from export import hf_tensors, save_model
from flax import nnx
from objective import build, restore, token_losses
from optax.contrib import MuonDimensionNumbers, muon
from products import in_bfloat16
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer

from jaxserve.core.config import ModelConfig

MUON_RATE, ADAM_RATE = 0.02, 0.004  # for the matrices of the layers; for embeddings and norms
WEIGHT_DECAY = 0.01
CLIP = 1.0
PROGRESS_TOKENS = 32_768  # held-out tokens measured during training; the last report uses all of them
MATRICES = {  # (input axes, output axes) of the layers' parameters; Muon treats every head as a matrix of its own
    "qkv": MuonDimensionNumbers(reduction_axis=3, output_axis=2),
    "o": MuonDimensionNumbers(reduction_axis=3, output_axis=0),
    "gate_up": MuonDimensionNumbers(reduction_axis=3, output_axis=2),
    "down": MuonDimensionNumbers(reduction_axis=1, output_axis=0),
}


def parse_args() -> argparse.Namespace:
    """Parse the command line, which needs at least one budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished checkpoint")
    parser.add_argument("--start", type=Path, help="a checkpoint of this script to go on from, with its tokenizer")
    parser.add_argument("--stdlib", type=Path, nargs="+", default=[corpus.default_stdlib()], help="folders to read")
    parser.add_argument("--held-out", type=float, default=0.02, help="share of files never trained on")
    parser.add_argument("--minutes", type=float, default=math.inf, help="budget of time, compilation aside")
    parser.add_argument("--steps", type=float, default=math.inf, help="budget of steps")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of one step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a training sequence")
    parser.add_argument("--long-length", type=int, default=2048, help="the same near the end; also max_position")
    parser.add_argument("--long-share", type=float, default=0.12, help="share of the budget spent on long sequences")
    parser.add_argument("--eval-every", type=int, default=200, help="steps between held-out losses")
    parser.add_argument("--seed", type=int, default=0)
    size = parser.add_argument_group("model")
    for name, default in (("vocab", 4096), ("hidden", 256), ("layers", 8), ("heads", 4), ("kv-heads", 2)):
        size.add_argument(f"--{name}", type=int, default=default)
    size.add_argument("--head-dim", type=int, default=64)
    size.add_argument("--intermediate", type=int, default=512)
    args = parser.parse_args()
    if math.isinf(args.minutes) and math.isinf(args.steps):
        parser.error("give a budget: --minutes, --steps or both")
    return args


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Return the model's configuration, in float32; token 0 begins and ends documents."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.intermediate,
        max_position=args.long_length,
        tie_embeddings=True,
        dtype="float32",
        bos_token_id=0,
        eos_token_ids=(0,),
    )


def optimizer() -> optax.GradientTransformation:
    """Return an optimizer: Muon for the layers' matrices, Adam for the rest, with updates scaled by a schedule."""

    def matrices(params: nnx.State) -> Any:
        return jax.tree.map_with_path(
            lambda path, _: next((MATRICES[k] for k in _names(path) if k in MATRICES), None), params
        )

    rule = muon(
        MUON_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_learning_rate=ADAM_RATE,
        adam_b2=0.95,
        muon_weight_dimension_numbers=matrices,
    )
    return optax.chain(optax.clip_by_global_norm(CLIP), rule)


def _names(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]


def schedule(progress: float) -> float:
    """Return the factor on the learning rates at a used share of the budget: a short warm-up, then linear to 0."""
    warm_up = 0.02
    return min(progress / warm_up, (1 - progress) / (1 - warm_up)) if progress < 1 else 0.0


@dataclass(frozen=True)
class Model:
    """The parameters that are trained, with the chain of blocks that runs them."""

    config: ModelConfig
    graph: nnx.GraphDef
    params: nnx.State


def make_step(model: Model, rule: optax.GradientTransformation) -> Any:
    """Return the jitted step (params, state, rows [batch, length + 1], rate) -> (params, state, loss).

    It donates `params` and `state`.
    """

    def objective(params: nnx.State, rows: jax.Array) -> jax.Array:
        return token_losses(model.config, model.graph, params, rows).mean()

    def step(params: nnx.State, state: Any, rows: jax.Array, rate: jax.Array) -> tuple[nnx.State, Any, jax.Array]:
        loss, grads = jax.value_and_grad(in_bfloat16(objective))(params, rows)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: u * rate, updates)), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def held_out_loss(losses: Callable[..., jax.Array], params: nnx.State, rows: np.ndarray, batch: int) -> float:
    """Return the mean loss in nats per token over rows, int32 [N, length + 1]."""
    total = 0.0
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        padded = np.pad(part, ((0, batch - len(part)), (0, 0)))
        total += float(losses(params, padded)[: part[:, 1:].size].sum())
    return total / rows[:, 1:].size


def train(args: argparse.Namespace, model: Model, texts: list[np.ndarray], held_out: list[np.ndarray]) -> Model:
    """Train within the budget of `args`, print the progress, and return the model. The given arrays are donated."""
    params, rule = model.params, optimizer()
    state = rule.init(params)
    rng = np.random.default_rng(args.seed)
    lengths = {False: args.length, True: args.long_length}
    streams = {late: data.batches(texts, args.batch_tokens // n, n, rng) for late, n in lengths.items()}
    step_fn = make_step(model, rule)
    steps = {late: step_fn.lower(params, state, next(streams[late]), jnp.float32(0)).compile() for late in lengths}
    losses = jax.jit(partial(token_losses, model.config, model.graph))
    watched = data.windows(held_out, args.length)[: PROGRESS_TOKENS // args.length]
    started, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        late = progress >= 1 - args.long_share
        params, state, loss = steps[late](params, state, next(streams[late]), jnp.float32(schedule(progress)))
        loss = float(loss)  # wait for the step, so that the time below is of finished work
        step, minutes = step + 1, (time.monotonic() - started) / 60
        progress = max(step / args.steps, minutes / args.minutes)
        if step % 10 == 0:
            tokens = step * args.batch_tokens
            print(f"step {step} tokens {tokens} minutes {minutes:.1f} ({progress:.1%}) loss {loss:.3f}", flush=True)
        if step % args.eval_every == 0:
            mean = held_out_loss(losses, params, watched, args.batch_tokens // args.length)
            print(f"step {step} held-out loss {mean:.4f}", flush=True)
    return replace(model, params=params)


def report(args: argparse.Namespace, model: Model, held_out: list[np.ndarray], held_out_bytes: int) -> dict[str, float]:
    """Return the held-out loss of the saved (bfloat16) weights at both lengths, in nats per token and bits per byte."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), model.params)
    losses = jax.jit(partial(token_losses, model.config, model.graph))
    tokens_per_byte = sum(len(text) - 1 for text in held_out) / held_out_bytes
    numbers: dict[str, float] = {}
    for length in (args.length, args.long_length):
        loss = held_out_loss(losses, params, data.windows(held_out, length), args.batch_tokens // length)
        numbers[f"held_out_loss_{length}"] = round(loss, 4)
        numbers[f"held_out_bits_per_byte_{length}"] = round(loss / math.log(2) * tokens_per_byte, 4)
    return numbers


def main() -> None:
    """Build the corpus and the tokenizer, train, report, and save the checkpoint."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    training, testing = corpus.split(corpus.collect(args.stdlib), args.held_out)
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer((document.text for document in training), args.vocab)
    save_tokenizer(tokenizer, args.out, args.long_length)
    texts, held_out = data.encode(tokenizer, training), data.encode(tokenizer, testing)
    sizes = {"documents": len(training), "held_out_documents": len(testing), "corpus_tokens": sum(map(len, texts))}
    print(sizes, flush=True)
    config = replace(model_config(args), vocab_size=tokenizer.get_vocab_size())
    start = restore(config, args.start) if args.start else build(config, args.seed)
    model = train(args, Model(config, *start), data.repeat_sources(training, texts), held_out)
    save_model(config, hf_tensors(config, model.graph, model.params), args.out)
    held_out_bytes = sum(len(document.text.encode()) for document in testing)
    print(json.dumps(sizes | report(args, model, held_out, held_out_bytes), indent=2))


if __name__ == "__main__":
    main()
