"""The native kernel that draws tokens, compared with XLA's sampler in every instruction set of this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.kernels.native import sampling as native
from jaxserve.parallel.placement import Placement
from jaxserve.sampling import ops as sampler
from jaxserve.sampling.device_sampler import DeviceSampler
from jaxserve.sampling.programs import SamplerPrograms
from tests.support.internals import sampling_calls, uniform_numbers
from tests.support.thorough import some

pytestmark = pytest.mark.usefixtures("native_kernels")
every_width = pytest.mark.parametrize("lanes", [16, 8, 4])
ROWS, SLOTS, BIASES = 5, 7, 6
XLA = jax.jit(sampler.sample_adjusted)
DRAW = jax.jit(native.draw, static_argnames="max_lanes")
DRAW_ADJUSTED = jax.jit(native.draw_adjusted, static_argnames="max_lanes")


def packed(vocab: int, rows: int = ROWS, **fields: np.ndarray | list | float) -> np.ndarray:
    """Return parameters (i32[11, R]) of rows in the first slots."""
    parameters = np.stack([sampler.idle_row(SLOTS, vocab)] * rows, axis=1)
    parameters[sampler.SLOT] = np.arange(rows)
    floats = parameters[sampler.FLOATS].view(np.float32)
    for name, values in fields.items():
        if name in sampler.FLOAT_FIELDS:
            floats[sampler.FLOAT_FIELDS.index(name)] = values
        else:
            parameters[getattr(sampler, name.upper())] = values
    return parameters


def floats_of(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_subnormal=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_native_draw_equals_xla_on_every_instruction_set(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([3, 300, 4096]), "vocab")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "numbers"))
    logits = rng.normal(0, data.draw(floats_of(0.125, 16), "spread"), (ROWS, vocab)).astype(np.float32)

    def of_rows(name: str, default: float, values: st.SearchStrategy) -> list:
        return data.draw(st.lists(st.just(default) | values, min_size=ROWS, max_size=ROWS), name)

    parameters = packed(
        vocab,
        slot=rng.permutation(SLOTS)[:ROWS],
        position=rng.integers(0, 1 << 20, ROWS),
        seed=rng.integers(-(2**31), 2**31, (2, ROWS)),
        temperature=of_rows("temperature", 0, floats_of(0.015625, 2)),
        top_k=of_rows("top_k", vocab, st.integers(1, vocab)),
        top_p=of_rows("top_p", 1, floats_of(0.015625, 1)),
        min_p=of_rows("min_p", 0, floats_of(0, 1)),
        repetition=of_rows("repetition", 1, floats_of(0.5, 2)),
        frequency=of_rows("frequency", 0, floats_of(-2, 2)),
        presence=of_rows("presence", 0, floats_of(-2, 2)),
    )
    newest = jnp.arange(SLOTS + 1, dtype=jnp.int32)
    seen = rng.random((SLOTS + 1, vocab)) < 0.3
    counts = rng.integers(0, 3, (SLOTS + 1, vocab)).astype(np.int32)
    ids, biases = np.full((ROWS, BIASES), sampler.NO_TOKEN, np.int32), np.zeros((ROWS, BIASES), np.float32)
    for row in range(ROWS):
        count = data.draw(st.integers(0, min(vocab, BIASES)), "biased")
        ids[row, :count] = rng.choice(vocab, count, replace=False)
        biases[row, :count] = rng.choice([-np.inf, -5, 5], count)
    history = sampler.History(jnp.asarray(seen), jnp.asarray(counts))
    tokens, after, counted = XLA(logits, parameters, newest, history, ids, biases)
    for lanes in (16, 8, 4):
        got = DRAW_ADJUSTED(logits, parameters, newest, seen, counts, ids, biases, max_lanes=lanes)
        for one, expected in zip(got, (tokens, after, counted.counts), strict=True):
            np.testing.assert_array_equal(one, expected)


@every_width
def test_native_draw_uses_the_uniform_numbers_of_jax(lanes: int) -> None:
    vocab, rows, rng = 1 << 16, 7, np.random.default_rng(0)
    seed, position = rng.integers(-(2**31), 2**31, (2, rows)), rng.integers(0, 1 << 30, rows)
    parameters = packed(vocab, rows, temperature=1.0, seed=seed, position=position)
    tokens, _ = DRAW(np.zeros((rows, vocab), np.float32), parameters, jnp.zeros(SLOTS + 1, jnp.int32), max_lanes=lanes)
    seeds = jnp.asarray(seed.astype(np.int32).view(np.uint32).T)
    uniform = uniform_numbers(seeds, jnp.asarray(position, jnp.int32))
    np.testing.assert_array_equal(tokens, np.floor(np.asarray(uniform) * vocab))


@every_width
def test_native_draw_keeps_all_equal_weights_at_the_limit(lanes: int) -> None:
    vocab, draws = 300, 40
    limits = {"top_k": [1, 7, 100, 101, vocab], "top_p": [1, 1, 1, 1, 0.3]}
    logits = np.where(np.arange(vocab) % 3, -4.0, 0.0).astype(np.float32)  # a hundred weigh as much as the heaviest
    drawn = set()
    for position in range(draws):
        parameters = packed(vocab, temperature=1.0, position=position, **limits)
        tokens, _ = DRAW(np.stack([logits] * ROWS), parameters, jnp.zeros(SLOTS + 1, jnp.int32), max_lanes=lanes)
        drawn |= set(np.asarray(tokens)[[0, 1, 2, 4]].tolist())
    assert all(token % 3 == 0 for token in drawn)
    assert len(drawn) > 20


@every_width
def test_native_draw_of_the_spare_slot_changes_nothing(lanes: int) -> None:
    vocab = 300
    parameters = packed(vocab, slot=[2, SLOTS, SLOTS, 0, SLOTS])
    logits = np.random.default_rng(1).normal(size=(ROWS, vocab)).astype(np.float32)
    before, counts = np.arange(SLOTS + 1, dtype=np.int32) + 1000, np.zeros((SLOTS + 1, vocab), np.int32)
    ids, biases = sampler.sparse_biases([], ROWS)
    tokens, newest, after = DRAW_ADJUSTED(logits, parameters, before, counts > 0, counts, ids, biases, max_lanes=lanes)
    best = logits.argmax(axis=1)
    np.testing.assert_array_equal(tokens, [best[0], 0, 0, best[3], 0])
    before[[2, 0]], counts[2, best[0]], counts[0, best[3]] = (best[0], best[3]), 1, 1
    np.testing.assert_array_equal(newest, before)
    np.testing.assert_array_equal(after, counts)


@every_width
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draws_report_rows_of_non_finite_logits(temperature: float, lanes: int) -> None:
    """Both samplers mark the row, and leave a token in `newest` that the next step can read."""
    vocab, slots = 300, 9
    logits = np.random.default_rng(0).normal(size=(slots, vocab)).astype(np.float32)
    logits[0] = -np.inf
    logits[1, 7] = np.inf
    logits[2] = np.nan
    logits[3, 299] = np.nan  # where no whole vector is
    logits[4, 5] = np.nan
    logits[5, 6], logits[5, 8] = np.inf, -np.inf
    logits[6, :298] = -np.inf  # banned
    logits[7, 9] = -np.inf
    asked = {"temperature": temperature, "top_p": 0.9, "top_k": 50}
    newest = jnp.full(slots + 1, 5, jnp.int32)
    ids, biases = sampler.sparse_biases([], slots)
    ids[8, 0], biases[8, 0] = 3, -np.inf
    history = sampler.empty_history(slots, vocab)
    for repetition in (1.0, 1.5):
        parameters = packed(vocab, slots, repetition=repetition, **asked)
        parameters[sampler.TOP_K], parameters[sampler.SLOT] = 50, np.arange(slots)
        kinds = [
            DRAW(logits, parameters, newest, max_lanes=lanes),
            DRAW_ADJUSTED(logits, parameters, newest, *history, ids, biases, max_lanes=lanes),
            jax.jit(sampler.sample_random)(logits, parameters, newest),
            jax.jit(sampler.sample_masked)(logits, parameters, newest),
            XLA(logits, parameters, newest, history, ids, biases),
        ]
        if temperature == 0:
            kinds.append(jax.jit(sampler.sample_greedy)(logits, parameters, newest))
        for tokens, after, *_ in kinds:
            assert (np.asarray(tokens)[:6] == -1).all()
            assert (np.asarray(tokens)[6:] >= 0).all()
            assert tokens[6] >= 298
            assert ((np.asarray(after) >= 0) & (np.asarray(after) < vocab)).all()


@pytest.mark.parametrize("slot", [-1, SLOTS + 1])
def test_native_draw_for_a_slot_out_of_range_is_refused(slot: int) -> None:
    parameters = packed(9, slot=slot)
    with pytest.raises(Exception, match=f"slot {slot} is outside {SLOTS + 1} slots"):
        jax.block_until_ready(DRAW(np.zeros((ROWS, 9), np.float32), parameters, jnp.zeros(SLOTS + 1, jnp.int32)))


@pytest.mark.parametrize(("backend", "native_runs"), some([("auto", True), ("native", True), ("xla", False)], 2))
def test_sampler_on_one_device_draws_natively_unless_xla_is_chosen(backend: str, native_runs: bool) -> None:
    several = jax.devices()[:2]
    for devices in [several[:1], several]:
        programs = SamplerPrograms(
            Placement(tuple(devices)), slots=SLOTS, vocab=9, max_len=16, top_logprobs=2, backend=backend
        )
        made = DeviceSampler(programs)
        logits = jax.device_put(jnp.zeros((ROWS, 9)), Placement(tuple(devices)).sharding())
        calls = [function.lower(*arguments).as_text() for function, arguments in sampling_calls(made, logits)]
        drawn = sum("jaxserve_draw" in call for call in calls)  # all but the masks, and log-probabilities beside them
        assert drawn == (len(calls) - 2 if native_runs and len(devices) == 1 else 0)
        made.run_on_padding(logits)
        made.close()


def test_min_p_of_1_leaves_the_most_likely_token() -> None:
    logits = np.random.default_rng(0).normal(0, 9.5, (ROWS, 3)).astype(np.float32)
    parameters = packed(3, slot=np.arange(ROWS), temperature=[1.125] * ROWS, min_p=[1.0] * ROWS)
    newest = jnp.arange(SLOTS + 1, dtype=jnp.int32)
    for draw in (DRAW, sampler.sample_random, jax.jit(sampler.sample_random)):
        np.testing.assert_array_equal(draw(logits, parameters, newest)[0], logits.argmax(axis=1))
