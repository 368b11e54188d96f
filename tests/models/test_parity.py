"""Every family computes what Hugging Face Transformers computes. The results are stored, so torch is not needed."""

import numpy as np
import pytest

from jaxserve.core.config import RopeConfig
from jaxserve.models.hf import rope_config
from jaxserve.models.rope import rope_frequencies
from tests.golden.cases import CASES, ROPE
from tests.golden.model import Golden, Model, golden, golden_json, relative_error


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Golden:
    return golden(request.param)


@pytest.fixture(scope="module")
def model(case: Golden, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(case.write(tmp_path_factory.mktemp(case.name)))


def test_logits_equal_those_of_transformers(case: Golden, model: Model):
    assert relative_error(model.logits(case.prompt), case.logits()) < 1e-4


def test_greedy_tokens_equal_those_of_transformers(case: Golden, model: Model):
    assert model.greedy(case.prompt, len(case.greedy)) == case.greedy
    assert len(case.greedy) == 64


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_logits_stay_close_to_float32(name: str, dtype: str, tmp_path):
    case = golden(name)
    got, expected = Model(case.write(tmp_path), dtype=dtype).logits(case.prompt), case.logits()
    assert got.dtype == np.float32
    error = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    limit = {"bfloat16": 0.05, "float16": 0.01}[dtype]
    assert np.median(error) < limit, "the median, because a token that changes experts changes much"


@pytest.mark.parametrize("name", ROPE)
def test_rope_frequencies_equal_those_of_transformers(name: str):
    expected = golden_json()["rope"][name]
    rope = rope_config({"rope_parameters": {"rope_theta": 500000.0, **ROPE[name]}, "max_position_embeddings": 131072})
    for head_dim, frequencies in zip((64, 128), expected["frequencies"], strict=True):
        got, scale = rope_frequencies(rope, head_dim)
        np.testing.assert_allclose(got, frequencies, rtol=2e-6)
        assert scale == pytest.approx(expected["scale"], rel=1e-6)


def test_rope_variants_differ():
    """A comparison with stored frequencies proves little if the variants are equal."""
    base, _ = rope_frequencies(RopeConfig(theta=500000.0), 64)
    for name in set(ROPE) - {"default"}:
        rope = rope_config({"rope_parameters": {"rope_theta": 500000.0, **ROPE[name]}, "max_position_embeddings": 1})
        assert not np.allclose(rope_frequencies(rope, 64)[0], base)
