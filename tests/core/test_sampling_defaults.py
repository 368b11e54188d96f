"""The option `override_generation_config`, and how it changes the model's defaults."""

from types import SimpleNamespace

import pytest

from jaxserve.async_llm import AsyncLLM
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.sampling_defaults import overridden
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.prompts import default_params


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ('{"temperature": 0.5, "top_k": 20}', {"temperature": 0.5, "top_k": 20}),
        ({"min_p": 0.1, "max_new_tokens": 1}, {"min_p": 0.1, "max_new_tokens": 1}),
        ({"top_p": None}, {"top_p": None}),
        ({}, None),
    ],
)
def test_overrides_are_json_or_a_mapping(given, expected):
    assert EngineConfig(override_generation_config=given).override_generation_config == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        (5, "must be a JSON object"),
        ({5: 1}, "must be a JSON object"),
        ('{"temprature": 1}', "has the key 'temprature': did you mean temperature?"),
        ({"seed": 1}, "has the key 'seed': choose from temperature, "),
        ({"temperature": -1}, "has temperature -1: it must be a number from 0 to 100"),
        ({"top_k": 1.5}, "has top_k 1.5: it must be an integer"),
        ({"max_new_tokens": 0}, "has max_new_tokens 0: it must be an integer of at least 1"),
        ({"max_new_tokens": True}, "has max_new_tokens True: it must be an integer of at least 1"),
    ],
)
def test_invalid_overrides_name_the_option(given, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(override_generation_config=given)
    assert message in str(error.value)
    assert "--override-generation-config" in str(error.value)
    assert "\n" not in str(error.value)


def test_overrides_change_add_and_remove_defaults():
    own = {"temperature": 0.6, "top_p": 0.9}
    changes = {"temperature": None, "top_p": 0.5, "top_k": 7, "max_new_tokens": 5}
    assert overridden(own, changes) == {"top_p": 0.5, "top_k": 7}
    assert overridden(own, {}) == own


def test_calls_without_sampling_params_get_the_models_defaults():
    info = ModelInfo("m", 100, 10, 4, 0, default_sampling={"temperature": 0.6, "top_k": 20}, max_new_tokens=50)
    params = default_params(info)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 1.0, 16)


def test_stream_without_sampling_params_asks_the_engine_for_the_models_defaults():
    llm = AsyncLLM.__new__(AsyncLLM)
    info = ModelInfo("m", 100, 10, 4, 0, default_sampling={"temperature": 0.6, "top_k": 20})
    llm._engine = SimpleNamespace(info=info, generate=lambda prompt, params, **options: params)
    assert llm.stream([1]) == llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    assert llm.stream([1], SamplingParams()) == SamplingParams()
