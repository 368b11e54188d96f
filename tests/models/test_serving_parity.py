"""Every family, served with paging, chunks and batches, gives the tokens of Transformers."""

import pytest

from jaxserve import LLM, SamplingParams
from tests.golden.model import golden

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "memory_gb": 2, "warmup": False, "max_num_batched_tokens": 36}

SERVED = (
    "llama3",
    "llama_linear_biases",
    "llama_yarn",
    "mistral_window",
    "qwen2_window",
    "qwen3_layer_types",
    "qwen3_moe",
)  # every feature; that the others compute the same is shown without an engine


@pytest.mark.parametrize("name", SERVED)
def test_served_greedy_tokens_equal_those_of_transformers(name: str, tmp_path):
    case = golden(name)
    others = [case.prompt[:9], case.prompt[5:]]
    with LLM(case.write(tmp_path, shards=2), **OPTIONS) as llm:
        first, *_ = llm.generate([case.prompt, *others], GREEDY, use_tqdm=False)
    assert list(first.outputs[0].token_ids) == case.greedy


@pytest.mark.parametrize(("name", "tp"), [("llama_linear_biases", 4), ("qwen3_layer_types", 2), ("qwen3_moe", 2)])
def test_tensor_parallel_greedy_tokens_equal_those_of_transformers(name: str, tp: int, tmp_path):
    case = golden(name)
    with LLM(case.write(tmp_path), tp=tp, **OPTIONS) as llm:
        (output,) = llm.generate([case.prompt], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == case.greedy
