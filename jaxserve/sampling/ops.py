"""Sampling on the device. Rows are independent: a row's token depends on its logits, its parameters, its seed and its
position alone, never on the batch.

Order of operations as in vLLM: log-probabilities are taken from the raw logits; then penalties, biases, temperature,
min_p, top_k, top_p, and one uniform number per row. native/draw.cc and logprobs.cc do the same on CPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.compilation.saved import savable
from jaxserve.core.request import Sequence
from jaxserve.core.sampling import MAX_SPARSE_BIAS
from jaxserve.kernels.native.draw import draw as draw_natively, draw_adjusted
from jaxserve.kernels.native.logprobs import logprobs as logprobs_natively

BLOCK = 128  # tokens of the vocabulary that are looked at together
NO_TOKEN = -1


class RowParams(NamedTuple):
    """What the sampler needs of each row, [R] each."""

    slot: Array  # i32: where the token goes; the spare slot for rows that sample nothing
    position: Array  # i32: position of the token to be sampled
    seed: Array  # u32 [R, 2]
    temperature: Array  # f32, 0 = greedy
    top_k: Array  # i32, vocabulary size = off
    top_p: Array  # f32, 1 = off
    min_p: Array  # f32, 0 = off
    presence: Array  # f32
    frequency: Array  # f32
    repetition: Array  # f32


@savable
class History(NamedTuple):
    """Which tokens the penalties count, by slot; the last slot is spare."""

    seen: Array  # bool [slots + 1, V]: tokens of the prompt
    counts: Array  # i32 [slots + 1, V]: generated tokens


@savable
class Logprobs(NamedTuple):
    """Log-probabilities of the sampled tokens and of the K most likely ones."""

    logprob: Array  # f32 [R]
    rank: Array  # i32 [R], 1 = most likely
    top_ids: Array  # i32 [R, K]
    top_logprobs: Array  # f32 [R, K]


def empty_history(slots: int, vocab: int) -> History:
    """The history of `slots` sequences that have seen nothing."""
    return History(jnp.zeros((slots + 1, vocab), bool), jnp.zeros((slots + 1, vocab), jnp.int32))


NUM_FIELDS = 11  # int32 words of a packed row
SLOT, POSITION, SEED, TOP_K, FLOATS = 0, 1, slice(2, 4), 4, slice(5, None)
FLOAT_FIELDS = ("top_p", "min_p", "presence", "frequency", "repetition", "temperature")  # in their order there


def idle_row(spare: int, vocab: int) -> np.ndarray:
    """The packed parameters i32[11] of a row that samples nothing: greedy, into the spare slot."""
    row = np.zeros(NUM_FIELDS, np.int32)
    row[SLOT], row[TOP_K] = spare, vocab
    row[FLOATS].view(np.float32)[:] = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    return row


def pack_row(sequence: Sequence, vocab: int) -> np.ndarray:
    """A sequence's packed parameters i32[11], but for the position (floats by their bits)."""
    p = sequence.params
    row = np.zeros(NUM_FIELDS, np.int32)
    row[SLOT] = sequence.slot
    row[SEED] = np.uint64(sequence.seed).reshape(1).view(np.int32)
    row[TOP_K] = min(p.top_k, vocab) if p.top_k > 0 else vocab
    temperature = 0.0 if p.greedy else p.temperature
    row[FLOATS].view(np.float32)[:] = (
        p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty, temperature,
    )  # fmt: skip
    return row


def unpack_rows(packed: Array) -> RowParams:
    """The parameters of packed rows i32[11, R], on the device."""
    floats = lax.bitcast_convert_type(packed[FLOATS], jnp.float32)
    return RowParams(
        slot=packed[SLOT],
        position=packed[POSITION],
        seed=lax.bitcast_convert_type(packed[SEED], jnp.uint32).T,
        top_k=packed[TOP_K],
        **dict(zip(FLOAT_FIELDS, floats, strict=True)),
    )


def sample_greedy(logits: Array, packed: Array, newest: Array) -> tuple[Array, Array]:
    """The most likely tokens i32[R] of logits f32[R, V], and `newest` i32[slots + 1] with them written in.

    Here and below the token of a row whose logits are not finite (see `checked`) is NO_TOKEN, though not in `newest`.
    """
    tokens = most_likely(logits)
    return checked(tokens, logits), newest.at[packed[0]].set(tokens)


def sample_random(logits: Array, packed: Array, newest: Array) -> tuple[Array, Array]:
    """As `sample_greedy`, but drawn at random where a row's temperature is not 0."""
    rows = unpack_rows(packed)
    tokens = draw(logits, rows)
    return checked(tokens, logits), newest.at[rows.slot].set(tokens)


def sample_adjusted(
    logits: Array, packed: Array, newest: Array, history: History, bias_ids: Array, biases: Array
) -> tuple[Array, Array, History]:
    """As `sample_random`, with penalties and sparse biases (i32[R, M] ids, NO_TOKEN = none; f32[R, M])."""
    rows = unpack_rows(packed)
    penalized = jnp.any((rows.repetition != 1) | (rows.frequency != 0) | (rows.presence != 0))
    adjusted = _if_asked(penalized, penalize, lambda x, *_: x, logits, rows, history)
    adjusted = _if_asked(jnp.any(bias_ids != NO_TOKEN), _add_biases, lambda x, *_: x, adjusted, bias_ids, biases)
    tokens = draw(adjusted, rows)
    history = history._replace(counts=history.counts.at[rows.slot, tokens].add(1))
    return checked(tokens, logits), newest.at[rows.slot].set(tokens), history


def sample_adjusted_natively(
    logits: Array, packed: Array, newest: Array, history: History, bias_ids: Array, biases: Array
) -> tuple[Array, Array, History]:
    """`sample_adjusted` by the native kernel."""
    tokens, newest, counts = draw_adjusted(logits, packed, newest, *history, bias_ids, biases)
    return tokens, newest, history._replace(counts=counts)


def sample_full(
    logits: Array, *adjusting: Any, by: "Implementation", top_logprobs: int
) -> tuple[Array, Array, History, Logprobs]:
    """As `sample_adjusted`, with log-probabilities of the logits as they came."""
    tokens, newest, history = by.adjusted(logits, *adjusting)
    return tokens, newest, history, by.logprobs(logits, jnp.maximum(tokens, 0), top_logprobs)


def load_history(history: History, slot: Array, tokens: Array, prompt: Array, total: Array) -> History:
    """Sets what a slot has seen: the first `prompt` of `tokens` i32[L] were given, those up to `total` generated."""
    at = jnp.arange(tokens.shape[0])
    vocab = history.seen.shape[1]
    given = jnp.where(at < prompt, tokens, vocab)
    generated = jnp.where((at >= prompt) & (at < total), tokens, vocab)
    seen = jnp.zeros(vocab, bool).at[given].set(True, mode="drop")
    counts = jnp.zeros(vocab, jnp.int32).at[generated].add(1, mode="drop")
    return History(history.seen.at[slot].set(seen), history.counts.at[slot].set(counts))


def _if_asked(asked: Array, compute: Callable, otherwise: Callable, *operands: Any) -> Any:
    """compute(*operands), or otherwise(*operands) where that will do as well.

    Elsewhere than on CPU it is computed in any case: the host would wait for the device to say whether to.
    """

    def ask(asked: Array, *operands: Any) -> Any:
        return lax.cond(asked, compute, otherwise, *operands)

    return lax.platform_dependent(asked, *operands, cpu=ask, default=lambda _, *operands: compute(*operands))


def _add_biases(logits: Array, ids: Array, biases: Array) -> Array:
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, jnp.where(ids == NO_TOKEN, logits.shape[1], ids)].add(biases, mode="drop")


def penalize(logits: Array, rows: RowParams, history: History) -> Array:
    """Repetition penalty (over prompt and output), then frequency and presence penalties (over output)."""
    counts = history.counts[rows.slot]
    repeated = history.seen[rows.slot] | (counts > 0)
    factor = jnp.where(repeated, rows.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - rows.frequency[:, None] * counts - rows.presence[:, None] * (counts > 0)


def checked(tokens: Array, logits: Array) -> Array:
    """The tokens i32[R], but NO_TOKEN for rows of logits f32[R, V] that hold a NaN or of which the largest is infinite.

    Logits of -infinity are allowed. The maximum over blocks is the same as in `most_likely`: XLA computes it once.
    """
    largest = jnp.max(jnp.max(_blocks(logits, -jnp.inf), axis=-1), axis=-1)
    return jnp.where(jnp.isfinite(largest), tokens, NO_TOKEN)


def most_likely(logits: Array) -> Array:
    """The first index i32[R] of the largest of each row of logits f32[R, V].

    In two levels, the best block and the best in it: XLA's CPU backend vectorises the first, and not an argmax over V.
    """
    blocks = _blocks(logits, -jnp.inf)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * BLOCK + jnp.argmax(inner, axis=-1)).astype(jnp.int32)


def _blocks(x: Array, padding: float) -> Array:
    """Rows [R, V] as blocks [R, V / BLOCK, BLOCK], the last one filled up."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)), constant_values=padding).reshape(x.shape[0], -1, BLOCK)


def draw(logits: Array, rows: RowParams) -> Array:
    """One token per row of logits f32[R, V], i32[R]."""
    return _if_asked(jnp.any(rows.temperature > 0), _draw, lambda logits, _: most_likely(logits), logits, rows)


def _draw(logits: Array, rows: RowParams) -> Array:
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    weights = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))  # the most likely token weighs 1
    weights = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)
    vocab = logits.shape[1]
    filtered = jnp.any((rows.temperature > 0) & ((rows.top_k < vocab) | (rows.top_p < 1)))
    weights = _if_asked(filtered, lambda w: top_p_mask(top_k_mask(w, rows.top_k), rows.top_p), lambda w: w, weights)
    uniform = jax.vmap(_uniform)(rows.seed, rows.position)
    drawn = inverse_transform(weights, uniform)
    return jnp.where(rows.temperature > 0, drawn, most_likely(logits))


def _uniform(seed: Array, position: Array) -> Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def top_k_mask(weights: Array, k: Array) -> Array:
    """Keeps the k heaviest of each row of weights f32[R, V] (and those that weigh as much as the k-th)."""
    return _keep_heaviest(weights, lambda kept: jnp.sum(kept, axis=-1) >= k)


def top_p_mask(weights: Array, p: Array) -> Array:
    """Keeps the smallest set of heaviest tokens whose share of each row's weight reaches p."""
    enough = p * jnp.sum(weights, axis=-1)
    # At p = 1 nothing may be lost to rounding.
    return _keep_heaviest(weights, lambda kept: (p < 1) & (jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= enough))


def _keep_heaviest(weights: Array, enough) -> Array:
    """Zeroes the weights below the largest threshold for which `enough(weights >= threshold)` holds.

    Bisection over the bits of the threshold: non-negative floats sort like integers. 31 passes and no sort, which is
    the slowest thing that XLA can be asked for on CPU.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)

    def narrow(i: int, threshold: Array) -> Array:
        candidate = threshold | (1 << (30 - i))
        return jnp.where(enough(bits >= candidate[:, None]), candidate, threshold)

    threshold = lax.fori_loop(0, 31, narrow, jnp.zeros(weights.shape[0], jnp.int32))
    return jnp.where(bits >= threshold[:, None], weights, 0.0)


def inverse_transform(weights: Array, uniform: Array) -> Array:
    """The token of each row of weights f32[R, V] at which the running sum passes uniform f32[R] of the total; i32[R].

    In two levels, since a running sum over the whole vocabulary is slow. A token of weight 0 is never taken.
    """
    blocks = _blocks(weights, 0)
    block, rest = _pass(jnp.sum(blocks, axis=-1), uniform)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _pass(inner, rest)
    return block * BLOCK + token


def _pass(weights: Array, uniform: Array) -> tuple[Array, Array]:
    """Index of the first running sum above uniform * total, and the place within that weight as a number in [0, 1)."""
    sums = jnp.cumsum(weights, axis=-1)
    target = jnp.minimum(uniform, 1 - 1e-6) * sums[:, -1]
    index = jnp.argmax(sums > target[:, None], axis=-1).astype(jnp.int32)
    weight = jnp.take_along_axis(weights, index[:, None], axis=-1)[:, 0]
    below = jnp.take_along_axis(sums, index[:, None], axis=-1)[:, 0] - weight
    return index, jnp.clip((target - below) / weight, 0.0, 1.0)


def logprobs_of(logits: Array, tokens: Array, top: int) -> Logprobs:
    """Log-probabilities of `tokens` i32[R] and of the `top` most likely under logits f32[R, V]."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    values, ids = lax.top_k(logits, top)
    return Logprobs((chosen - normalizer)[:, 0], rank, ids.astype(jnp.int32), values - normalizer)


def logprobs_of_natively(logits: Array, tokens: Array, top: int) -> Logprobs:
    """`logprobs_of` by the native kernel."""
    return Logprobs(*logprobs_natively(logits, tokens, top))


class Implementation(NamedTuple):
    """`sample_greedy`, `sample_random`, `sample_adjusted` and `logprobs_of`, or what does the same."""

    greedy: Callable[..., tuple[Array, Array]]
    random: Callable[..., tuple[Array, Array]]
    adjusted: Callable[..., tuple[Array, Array, History]]
    logprobs: Callable[[Array, Array, int], Logprobs]


XLA = Implementation(sample_greedy, sample_random, sample_adjusted, logprobs_of)
NATIVE = Implementation(draw_natively, draw_natively, sample_adjusted_natively, logprobs_of_natively)
"""On one CPU device."""


def sparse_biases(sequences: list[Sequence | None], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The biased and banned tokens of each row: i32[R, MAX_SPARSE_BIAS] ids and f32 biases (-inf = banned)."""
    ids = np.full((rows, MAX_SPARSE_BIAS), NO_TOKEN, np.int32)
    biases = np.zeros((rows, MAX_SPARSE_BIAS), np.float32)
    for row, sequence in enumerate(sequences):
        if sequence is None:
            continue
        entries = dict(sequence.params.logit_bias or {}) | dict.fromkeys(banned_tokens(sequence), -np.inf)
        ids[row, : len(entries)] = list(entries)
        biases[row, : len(entries)] = list(entries.values())
    return ids, biases


def banned_tokens(sequence: Sequence) -> set[int]:
    """Tokens that may not come next: stops before min_tokens, and the ends of bad words that have begun."""
    banned = set()
    generated = sequence.num_computed - sequence.num_prompt  # the token to be sampled is this one, counted from 0
    if generated < sequence.params.min_tokens:
        banned |= sequence.stop_ids
    for *head, end in sequence.bad_words:
        if not head or sequence.tokens[-len(head) :] == head:
            banned.add(end)
    return banned


def needs_adjusting(sequence: Sequence) -> bool:
    """Whether a row needs `sample_adjusted`."""
    return sequence.params.penalized or is_biased(sequence)


def wants_logprobs(sequence: Sequence) -> bool:
    """Whether a row needs `sample_full`."""
    return sequence.params.logprobs is not None


def may_need_more(sequence: Sequence) -> bool:
    """Whether a row of the sequence may ever need one of the two."""
    p = sequence.params
    return wants_logprobs(sequence) or p.penalized or bool(p.logit_bias or sequence.bad_words or p.min_tokens)


def is_biased(sequence: Sequence) -> bool:
    """Whether a row may have entries in `sparse_biases`."""
    p = sequence.params
    return bool(p.logit_bias or sequence.bad_words or sequence.num_computed - sequence.num_prompt < p.min_tokens)
