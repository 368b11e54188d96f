"""Operations of sampling on the device.

Rows are independent: a row's token depends only on its logits, its parameters, its seed and its position.

The order of operations is that of vLLM: log-probabilities of the raw logits, then penalties, biases, temperature,
min_p, top_k, top_p, and one uniform number per row. On CPU native/draw.cc and native/logprobs.cc compute the same.
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
from jaxserve.kernels.native.sampling import draw as draw_natively, draw_adjusted, logprobs as logprobs_natively

BLOCK = 128  # tokens of the vocabulary that one step of a two-level search covers
NO_TOKEN = -1


class RowParams(NamedTuple):
    """The sampling parameters of a step's rows, [R] each."""

    slot: Array  # i32: index of the token in `newest`; the spare slot for rows that sample nothing
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
    """The tokens that penalties count, by slot; the last slot is spare."""

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
    """Return the history of `slots` sequences without tokens."""
    return History(jnp.zeros((slots + 1, vocab), bool), jnp.zeros((slots + 1, vocab), jnp.int32))


NUM_FIELDS = 11  # int32 words of a packed row
SLOT, POSITION, SEED, TOP_K, FLOATS = 0, 1, slice(2, 4), 4, slice(5, None)
FLOAT_FIELDS = ("top_p", "min_p", "presence", "frequency", "repetition", "temperature")  # in the order of a packed row


def idle_row(spare: int, vocab: int) -> np.ndarray:
    """Return the packed parameters i32[11] of a row that samples nothing: greedy, into the spare slot."""
    row = np.zeros(NUM_FIELDS, np.int32)
    row[SLOT], row[TOP_K] = spare, vocab
    row[FLOATS].view(np.float32)[:] = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    return row


def pack_row(sequence: Sequence, vocab: int) -> np.ndarray:
    """Return a sequence's packed parameters i32[11] without the position. Floats are stored by their bits."""
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
    """Return the parameters of packed rows i32[11, R], on the device."""
    floats = lax.bitcast_convert_type(packed[FLOATS], jnp.float32)
    return RowParams(
        slot=packed[SLOT],
        position=packed[POSITION],
        seed=lax.bitcast_convert_type(packed[SEED], jnp.uint32).T,
        top_k=packed[TOP_K],
        **dict(zip(FLOAT_FIELDS, floats, strict=True)),
    )


def sample_greedy(logits: Array, packed: Array, newest: Array) -> tuple[Array, Array]:
    """Return the most likely tokens i32[R] of logits f32[R, V], and `newest` i32[slots + 1] with these tokens.

    All sampling functions return NO_TOKEN for a row with invalid logits (see `checked`). `newest` never holds it.
    """
    tokens = most_likely(logits)
    return checked(tokens, logits), newest.at[packed[0]].set(tokens)


def sample_random(logits: Array, packed: Array, newest: Array) -> tuple[Array, Array]:
    """Return tokens and `newest` as `sample_greedy` does, drawn at random in rows whose temperature is not 0."""
    rows = unpack_rows(packed)
    tokens = draw(logits, rows)
    return checked(tokens, logits), newest.at[rows.slot].set(tokens)


def sample_adjusted(
    logits: Array, packed: Array, newest: Array, history: History, bias_ids: Array, biases: Array
) -> tuple[Array, Array, History]:
    """Return tokens and `newest` as `sample_random` does, after penalties and biases, and the updated history.

    The biases f32[R, M] belong to the tokens `bias_ids` i32[R, M], where NO_TOKEN means none.
    """
    rows = unpack_rows(packed)
    penalized = jnp.any((rows.repetition != 1) | (rows.frequency != 0) | (rows.presence != 0))
    adjusted = _if_needed(penalized, penalize, lambda x, *_: x, logits, rows, history)
    adjusted = _if_needed(jnp.any(bias_ids != NO_TOKEN), _add_biases, lambda x, *_: x, adjusted, bias_ids, biases)
    tokens = draw(adjusted, rows)
    history = history._replace(counts=history.counts.at[rows.slot, tokens].add(1))
    return checked(tokens, logits), newest.at[rows.slot].set(tokens), history


def sample_adjusted_natively(
    logits: Array, packed: Array, newest: Array, history: History, bias_ids: Array, biases: Array
) -> tuple[Array, Array, History]:
    """Return the results of `sample_adjusted` by the native kernel."""
    tokens, newest, counts = draw_adjusted(logits, packed, newest, *history, bias_ids, biases)
    return tokens, newest, history._replace(counts=counts)


def sample_full(
    logits: Array, *operands: Any, implementation: "Implementation", top_logprobs: int
) -> tuple[Array, Array, History, Logprobs]:
    """Return the results of `sample_adjusted`, and log-probabilities of the unadjusted logits.

    `operands` are those of `sample_adjusted` after the logits.
    """
    tokens, newest, history = implementation.adjusted(logits, *operands)
    return tokens, newest, history, implementation.logprobs(logits, jnp.maximum(tokens, 0), top_logprobs)


def mask_logits(logits: Array, masks: Array, masked: Array) -> Array:
    """Return logits f32[R, V] with -infinity for the tokens that grammars forbid, in rows that are `masked` bool[R].

    Bit t % 32 of `masks` u32[R, ceil(V / 32)] at t // 32 says whether token t is allowed.
    """
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]].astype(bool)
    return jnp.where(allowed | ~masked[:, None], logits, -jnp.inf)


def logprobs_of_sampled(implementation: "Implementation", logits: Array, tokens: Array, *, top: int) -> Logprobs:
    """Return the log-probabilities of sampled tokens i32[R], of which those that are NO_TOKEN have no meaning."""
    return implementation.logprobs(logits, jnp.maximum(tokens, 0), top)


def load_history(history: History, slot: Array, tokens: Array, prompt: Array, total: Array) -> History:
    """Return the history with the tokens of a slot replaced.

    The first `prompt` of the `tokens` i32[L] are the prompt, and those from there up to `total` were generated.
    """
    at = jnp.arange(tokens.shape[0])
    vocab = history.seen.shape[1]
    given = jnp.where(at < prompt, tokens, vocab)
    generated = jnp.where((at >= prompt) & (at < total), tokens, vocab)
    seen = jnp.zeros(vocab, bool).at[given].set(True, mode="drop")
    counts = jnp.zeros(vocab, jnp.int32).at[generated].add(1, mode="drop")
    return History(history.seen.at[slot].set(seen), history.counts.at[slot].set(counts))


def _if_needed(needed: Array, compute: Callable, otherwise: Callable, *operands: Any) -> Any:
    """Return compute(*operands), or on CPU the equal otherwise(*operands) if that is not `needed`.

    Other platforms always compute, because the host would have to wait for the device's value of `needed`.
    """

    def branch(needed: Array, *operands: Any) -> Any:
        return lax.cond(needed, compute, otherwise, *operands)

    return lax.platform_dependent(needed, *operands, cpu=branch, default=lambda _, *operands: compute(*operands))


def _add_biases(logits: Array, ids: Array, biases: Array) -> Array:
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, jnp.where(ids == NO_TOKEN, logits.shape[1], ids)].add(biases, mode="drop")


def penalize(logits: Array, rows: RowParams, history: History) -> Array:
    """Return logits after the repetition penalty (prompt and output) and frequency and presence penalties (output)."""
    counts = history.counts[rows.slot]
    repeated = history.seen[rows.slot] | (counts > 0)
    factor = jnp.where(repeated, rows.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - rows.frequency[:, None] * counts - rows.presence[:, None] * (counts > 0)


def checked(tokens: Array, logits: Array) -> Array:
    """Return the tokens i32[R], with NO_TOKEN for rows of logits f32[R, V] with a NaN or an infinite maximum.

    Logits of -infinity are allowed. XLA computes the maximum over blocks once for this function and `most_likely`.
    """
    largest = jnp.max(jnp.max(_blocks(logits, -jnp.inf), axis=-1), axis=-1)
    return jnp.where(jnp.isfinite(largest), tokens, NO_TOKEN)


def most_likely(logits: Array) -> Array:
    """Return the first index i32[R] of the maximum of each row of logits f32[R, V].

    It is found in two levels, the best block and the best token in it, because XLA's CPU backend vectorises the maxima
    of blocks but not an argmax over V.
    """
    blocks = _blocks(logits, -jnp.inf)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * BLOCK + jnp.argmax(inner, axis=-1)).astype(jnp.int32)


def _blocks(x: Array, padding: float) -> Array:
    """Return rows [R, V] as blocks [R, ceil(V / BLOCK), BLOCK], the last one padded."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)), constant_values=padding).reshape(x.shape[0], -1, BLOCK)


def draw(logits: Array, rows: RowParams) -> Array:
    """Return one token per row of logits f32[R, V], i32[R]: random, or the most likely at temperature 0."""
    return _if_needed(jnp.any(rows.temperature > 0), _draw, lambda logits, _: most_likely(logits), logits, rows)


def _draw(logits: Array, rows: RowParams) -> Array:
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    weights = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))  # the most likely token weighs 1
    # XLA may round the weight of the most likely token to a little less than 1, and min_p may be 1.
    is_largest = logits == logits.max(axis=-1, keepdims=True)
    weights = jnp.where(is_largest | (weights >= rows.min_p[:, None]), weights, 0.0)
    vocab = logits.shape[1]
    filtered = jnp.any((rows.temperature > 0) & ((rows.top_k < vocab) | (rows.top_p < 1)))
    weights = _if_needed(filtered, lambda w: top_p_mask(top_k_mask(w, rows.top_k), rows.top_p), lambda w: w, weights)
    uniform = jax.vmap(_uniform)(rows.seed, rows.position)
    drawn = inverse_transform(weights, uniform)
    return jnp.where(rows.temperature > 0, drawn, most_likely(logits))


def _uniform(seed: Array, position: Array) -> Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def top_k_mask(weights: Array, k: Array) -> Array:
    """Zero all but the k largest of each row of weights f32[R, V], and those equal to the k-th."""
    return _zero_below_threshold(weights, lambda above: jnp.sum(above, axis=-1) >= k)


def top_p_mask(weights: Array, p: Array) -> Array:
    """Zero all but the smallest set of largest weights whose share of each row's sum reaches p."""
    enough = p * jnp.sum(weights, axis=-1)

    def is_enough(above: Array) -> Array:
        # At p = 1 rounding must not drop any token.
        return (p < 1) & (jnp.sum(jnp.where(above, weights, 0.0), axis=-1) >= enough)

    return _zero_below_threshold(weights, is_enough)


def _zero_below_threshold(weights: Array, enough) -> Array:
    """Zero the weights below the largest threshold for which `enough(weights >= threshold)` holds.

    The bits of the threshold are found by bisection, since non-negative floats sort like integers. This takes 31 passes
    and no sort, which is XLA's slowest operation on CPU.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)

    def narrow(i: int, threshold: Array) -> Array:
        candidate = threshold | (1 << (30 - i))
        return jnp.where(enough(bits >= candidate[:, None]), candidate, threshold)

    threshold = lax.fori_loop(0, 31, narrow, jnp.zeros(weights.shape[0], jnp.int32))
    return jnp.where(bits >= threshold[:, None], weights, 0.0)


def inverse_transform(weights: Array, uniform: Array) -> Array:
    """Return the token i32[R] at which the running sum of weights f32[R, V] exceeds the share `uniform` f32[R].

    It is found in two levels, because a running sum over the whole vocabulary is slow. A token of weight 0 is never
    drawn.
    """
    blocks = _blocks(weights, 0)
    block, rest = _first_above(jnp.sum(blocks, axis=-1), uniform)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _first_above(inner, rest)
    return block * BLOCK + token


def _first_above(weights: Array, uniform: Array) -> tuple[Array, Array]:
    """Return the index of the first running sum above uniform * total, and the position in that weight, in [0, 1]."""
    sums = jnp.cumsum(weights, axis=-1)
    target = jnp.minimum(uniform, 1 - 1e-6) * sums[:, -1]
    index = jnp.argmax(sums > target[:, None], axis=-1).astype(jnp.int32)
    weight = jnp.take_along_axis(weights, index[:, None], axis=-1)[:, 0]
    below = jnp.take_along_axis(sums, index[:, None], axis=-1)[:, 0] - weight
    return index, jnp.clip((target - below) / weight, 0.0, 1.0)


def logprobs_of(logits: Array, tokens: Array, top: int) -> Logprobs:
    """Return log-probabilities of `tokens` i32[R] and of the `top` most likely tokens under logits f32[R, V]."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    values, ids = lax.top_k(logits, top)
    return Logprobs((chosen - normalizer)[:, 0], rank, ids.astype(jnp.int32), values - normalizer)


def logprobs_of_natively(logits: Array, tokens: Array, top: int) -> Logprobs:
    """Return the results of `logprobs_of` by the native kernel."""
    return Logprobs(*logprobs_natively(logits, tokens, top))


class Implementation(NamedTuple):
    """One implementation of `sample_greedy`, `sample_random`, `sample_adjusted` and `logprobs_of`."""

    greedy: Callable[..., tuple[Array, Array]]
    random: Callable[..., tuple[Array, Array]]
    adjusted: Callable[..., tuple[Array, Array, History]]
    logprobs: Callable[[Array, Array, int], Logprobs]


XLA = Implementation(sample_greedy, sample_random, sample_adjusted, logprobs_of)
NATIVE = Implementation(draw_natively, draw_natively, sample_adjusted_natively, logprobs_of_natively)
"""The implementation for one CPU device, by native kernels."""


def grammar_masks(sequences: list[Sequence | None], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return `masks` and `masked` of `mask_logits` for logits of this shape, from the matchers of the rows."""
    masks, masked = np.zeros((shape[0], -(-shape[1] // 32)), np.uint32), np.zeros(shape[0], bool)
    for row, sequence in enumerate(sequences):
        if sequence is not None and sequence.matcher is not None:
            sequence.matcher.fill(masks[row])
            masked[row] = True
    return masks, masked


def sparse_biases(sequences: list[Sequence | None], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the biased and banned tokens of each row: i32[R, MAX_SPARSE_BIAS] ids and f32 biases (-inf = banned)."""
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
    """Return the tokens that must not come next: stops before min_tokens, and last tokens of bad words that began."""
    banned = set()
    generated = sequence.num_computed - sequence.num_prompt  # the index of the token to be sampled, from 0
    if generated < sequence.params.min_tokens:
        banned |= sequence.stop_ids
    for *head, end in sequence.bad_words:
        if not head or sequence.tokens[-len(head) :] == head:
            banned.add(end)
    return banned


def needs_adjusting(sequence: Sequence) -> bool:
    """Return whether a sequence needs penalties or biases in this step."""
    return sequence.params.penalized or is_biased(sequence)


def wants_logprobs(sequence: Sequence) -> bool:
    """Return whether a sequence needs log-probabilities."""
    return sequence.params.logprobs is not None


def may_need_adjusting(sequence: Sequence) -> bool:
    """Return whether a sequence may ever need penalties, biases or log-probabilities."""
    p = sequence.params
    return wants_logprobs(sequence) or p.penalized or bool(p.logit_bias or sequence.bad_words or p.min_tokens)


def is_biased(sequence: Sequence) -> bool:
    """Return whether a sequence may have entries in `sparse_biases` in this step."""
    p = sequence.params
    return bool(p.logit_bias or sequence.bad_words or sequence.num_computed - sequence.num_prompt < p.min_tokens)
