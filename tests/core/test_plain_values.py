"""Numbers and arrays of NumPy are taken as Python's, wherever users give numbers."""

from array import array

import numpy as np
import pytest

from jaxserve import EngineConfig, ReasoningSection, SamplingParams, StructuredOutput
from jaxserve.core.options import check_ranges
from jaxserve.core.plain_values import plain
from jaxserve.engine.prompts import as_prompts
from jaxserve.engine.token_ids import as_token_ids


def test_sampling_parameters_of_numpy_are_those_of_python() -> None:
    given = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=np.asarray(0.25),
        ignore_eos=np.bool_(True),
        max_tokens=np.uint8(4),
        seed=np.int64(-1),
        stop=np.array(["a", "b"]),
        stop_token_ids=np.array([1, 2]),
        bad_words=[np.str_("x")],
        logit_bias={np.int64(3): np.float32(1)},
        allowed_token_ids=np.arange(5),
        logprobs=np.int32(1),
    )
    expected = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.25,
        ignore_eos=True,
        max_tokens=4,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        bad_words=["x"],
        logit_bias={3: 1.0},
        allowed_token_ids=[0, 1, 2, 3, 4],
        logprobs=1,
    )
    assert given == expected
    assert repr(given) == repr(expected)  # of the same types, which equal numbers need not have


def test_options_of_numpy_are_those_of_python() -> None:
    given = EngineConfig(max_model_len=np.int64(64), warmup=np.bool_(False), memory_gb=np.float64(1.5), tp=np.int8(1))
    check_ranges(given)
    assert repr(given) == repr(EngineConfig(max_model_len=64, warmup=False, memory_gb=1.5))
    assert repr(ReasoningSection("<a>", "</a>", max_tokens=np.int64(5)).max_tokens) == "5"
    assert StructuredOutput(choice=np.array(["yes", "no"])).text == '["yes", "no"]'


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (np.array([1, 2]), [(1, 2)]),
        (np.array([[1, 2], [3, 4]]), [(1, 2), (3, 4)]),
        ([np.int64(1), 2], [(1, 2)]),
        ([np.array([1, 2]), [3]], [(1, 2), (3,)]),
        (array("i", [1, 2]), [(1, 2)]),
        ({"prompt_token_ids": np.array([1, 2])}, [(1, 2)]),
    ],
)
def test_prompts_may_be_arrays(given, ids) -> None:
    prompts = [prompt.token_ids for prompt in as_prompts(given)]
    assert prompts == ids
    assert {type(token) for each in prompts for token in each} == {int}


@pytest.mark.parametrize("wrong", [np.array([1.5]), np.array([True]), "ab", b"ab", 5, None, {}, {1, 2}])
def test_what_is_no_series_of_integers_is_refused(wrong) -> None:
    with pytest.raises(TypeError):
        as_token_ids(wrong)


@pytest.mark.parametrize("value", [None, 1, "a", [1, 2], (1,), {"a": 1}, np.int64, object()])
def test_all_else_stays_as_it_is(value) -> None:
    assert plain(value) is value
