"""The sampler's state of a slot is made anew for a sequence that has come from another instance, or back from one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.request import Request, Sequence
from jaxserve.core.sampling import SamplingParams
from jaxserve.parallel.placement import Placement
from jaxserve.sampling.device_sampler import DeviceSampler
from jaxserve.sampling.programs import SamplerPrograms

VOCAB = 16
LOGITS = jnp.asarray(np.linspace(1.0, 0.0, VOCAB, dtype=np.float32))[None]


def sampler() -> DeviceSampler:
    placement = Placement((jax.devices()[0],))
    return DeviceSampler(SamplerPrograms(placement, slots=2, vocab=VOCAB, max_len=32, top_logprobs=1))


def sequence() -> Sequence:
    """Return a sequence that may have each token once, as its penalty is larger than the differences of the logits."""
    params = SamplingParams(max_tokens=20, temperature=0, frequency_penalty=2.0)
    return Sequence(Request("r", (15,), params, 0.0), 0, 0, 21)


def generate(device: DeviceSampler, sequence: Sequence, slot: int, count: int) -> None:
    """Give a sequence a slot and let it generate so many tokens there."""
    sequence.slot, sequence.starts = slot, sequence.starts + 1
    for _ in range(count):
        sequence.num_computed = len(sequence.tokens)
        sequence.tokens.append(int(device.sample(LOGITS, [sequence]).tokens[0]))


@pytest.mark.parametrize("back", [0, 1], ids=["same slot", "other slot"])
def test_sequence_that_returns_to_a_sampler_keeps_its_history(back: int) -> None:
    first, second, moved = sampler(), sampler(), sequence()
    generate(first, moved, 0, 3)
    generate(second, moved, 0, 3)
    generate(first, moved, back, 3)
    assert moved.tokens[1:] == list(range(9)), "no token comes twice"


def test_slot_that_had_another_sequence_has_the_history_of_the_new_one() -> None:
    device = sampler()
    generate(device, sequence(), 0, 3)
    new = sequence()
    generate(device, new, 0, 3)
    assert new.tokens[1:] == [0, 1, 2]
