"""Operations of sampling on the device.

Rows are independent: a row's token depends only on its logits, its parameters, its seed and its position.

The order of operations is that of vLLM: log-probabilities of the raw logits, then penalties, biases, temperature,
min_p, top_k, top_p, and one uniform number per row (drawing.py). On CPU native/draw.cc and native/logprobs.cc compute
the same.
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
from jaxserve.sampling.drawing import NO_TOKEN, RowParams, checked, draw, if_needed, most_likely


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
    """Return tokens and `newest` as `sample_greedy` does, drawn at random in rows whose temperature is not 0.

    No row may ask for top_k or top_p (see `needs_masks`).
    """
    return _sample(logits, packed, newest, masks=False)


def sample_masked(logits: Array, packed: Array, newest: Array) -> tuple[Array, Array]:
    """Return tokens and `newest` as `sample_random` does, for rows that may ask for top_k and top_p."""
    return _sample(logits, packed, newest, masks=True)


def _sample(logits: Array, packed: Array, newest: Array, *, masks: bool) -> tuple[Array, Array]:
    rows = unpack_rows(packed)
    tokens = draw(logits, rows, masks=masks)
    return checked(tokens, logits), newest.at[rows.slot].set(tokens)


def sample_adjusted(
    logits: Array, packed: Array, newest: Array, history: History, bias_ids: Array, biases: Array
) -> tuple[Array, Array, History]:
    """Return tokens and `newest` as `sample_masked` does, after penalties and biases, and the updated history.

    The biases f32[R, M] belong to the tokens `bias_ids` i32[R, M], where NO_TOKEN means none.
    """
    rows = unpack_rows(packed)
    penalized = jnp.any((rows.repetition != 1) | (rows.frequency != 0) | (rows.presence != 0))
    adjusted = if_needed(penalized, penalize, lambda x, *_: x, logits, rows, history)
    adjusted = if_needed(jnp.any(bias_ids != NO_TOKEN), _add_biases, lambda x, *_: x, adjusted, bias_ids, biases)
    tokens = draw(adjusted, rows, masks=True)
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
    """One implementation of `sample_greedy`, `sample_random`, `sample_masked`, `sample_adjusted` and `logprobs_of`."""

    greedy: Callable[..., tuple[Array, Array]]
    random: Callable[..., tuple[Array, Array]]
    masked: Callable[..., tuple[Array, Array]]
    adjusted: Callable[..., tuple[Array, Array, History]]
    logprobs: Callable[[Array, Array, int], Logprobs]


XLA = Implementation(sample_greedy, sample_random, sample_masked, sample_adjusted, logprobs_of)
XLA_ON_CPU = XLA._replace(random=sample_masked)
"""The implementation for several CPU devices, whose programs find out while they run that no row asks for masks."""
NATIVE = Implementation(draw_natively, draw_natively, draw_natively, sample_adjusted_natively, logprobs_of_natively)
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


def needs_masks(sequence: Sequence, vocab: int) -> bool:
    """Return whether a sequence draws at random from a part of the vocabulary, by top_k or top_p."""
    p = sequence.params
    return not p.greedy and (0 < p.top_k < vocab or p.top_p < 1)


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
