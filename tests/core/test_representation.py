"""Values that are short where they are shown: what differs from the defaults, and no long contents."""

import numpy as np

from jaxserve import CompletionOutput, RequestOutput, SamplingParams, StructuredOutput
from jaxserve.core.representation import shortened


def test_sampling_params_show_what_differs_from_the_defaults() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(temperature=0, max_tokens=None, stop=["a"], ignore_eos=True)
    assert repr(params) == "SamplingParams(temperature=0, max_tokens=None, stop=['a'], ignore_eos=True)"
    assert eval(repr(params)) == params


def test_value_of_another_type_differs_from_an_equal_default() -> None:
    assert repr(SamplingParams(temperature=1)) == "SamplingParams(temperature=1)"


def test_structured_output_shows_the_demand_alone() -> None:
    assert repr(StructuredOutput(regex="a+")) == "StructuredOutput(regex='a+')"
    schema = {"type": "object", "description": "x" * 1000}
    shown = repr(StructuredOutput(json=schema, strict=True, place="response_format"))
    assert shown.startswith("StructuredOutput(json={'type': 'object', 'description': 'xxx")
    assert shown.endswith("..., strict=True)")
    assert len(shown) < 300


def test_outputs_show_texts_and_count_tokens() -> None:
    answer = CompletionOutput(0, "y" * 100, tuple(range(40)), finish_reason="length")
    output = RequestOutput("7", "def f(x):", (1, 2, 3), (answer,), True)
    assert repr(answer) == (
        f"CompletionOutput(index=0, text='{'y' * 57}'..., token_ids=<40 entries>, finish_reason='length')"
    )
    assert repr(output) == (
        f"RequestOutput(request_id='7', prompt='def f(x):', prompt_token_ids=(1, 2, 3), outputs=({answer!r},), "
        "finished=True)"
    )


def test_arrays_show_their_shape() -> None:
    output = RequestOutput("7", None, (1,), (), True, embedding=np.zeros((64,), np.float32))
    assert "embedding=<float32[64]>" in repr(output)
    assert shortened([np.zeros((2, 3), np.int8)]) == "[<int8[2, 3]>]"
