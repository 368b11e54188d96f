"""Instances on real devices that merge and split in the middle of answers, which stay those of an unchanged plan."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.core.sampling import SamplingParams
from tests.conftest import TINY
from tests.support.regrouped import Change, Regrouped

DENSE = TINY | {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.9, top_p=0.9, seed=5),
    "penalised": replace(GREEDY, temperature=0.7, seed=3, frequency_penalty=1.2, repetition_penalty=1.3),
    "several": replace(GREEDY, temperature=0.8, seed=7, n=2),
    "log-probabilities": replace(GREEDY, logprobs=3),
    "prompt": replace(GREEDY, prompt_logprobs=2, max_tokens=12),
    "biased": replace(GREEDY, logit_bias={9: 4.0}, min_tokens=3, bad_words=None),
    "seedless": replace(GREEDY, temperature=0.9, seed=None, top_k=1),
}


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt_of(number: int, length: int, shared: int = 0) -> list[int]:
    rng = np.random.default_rng(1)
    common = rng.integers(3, 499, shared).tolist()
    return common + np.random.default_rng(100 + number).integers(3, 499, length).tolist()


def up_and_down(engine: Regrouped) -> Iterator[Change]:
    """Return the changes 1 -> 2 -> 4 -> 2 -> 1."""
    yield lambda e: e.merge("0", "1")
    yield lambda e: e.merge("2", "3")
    yield lambda e: e.merge(*e.names)
    yield lambda e: e.split(e.names[0])
    yield lambda e: e.split(e.names[0])
    yield lambda e: e.split(next(i.name for i in e.plan.instances if i.tp > 1))


def answers(model: Path, ask: Callable[[Regrouped], None], *, change: bool, **options: Any) -> dict[str, Any]:
    engine = Regrouped(model, **options)
    try:
        ask(engine)
        engine.run(up_and_down(engine) if change else ())
        engine.check_idle()
        return {name: (o.outputs, o.prompt_logprobs, o.error) for name, o in engine.answers.items()}
    finally:
        engine.close()


def all_kinds(engine: Regrouped) -> None:
    """Ask for answers of all kinds: more than run at once, with prompts of several chunks."""
    for number, params in enumerate((*KINDS.values(), *KINDS.values())):
        engine.add(prompt_of(number, 5 + 13 * (number % 9), shared=33 if number % 2 else 0), params)


def same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name in left:
        a, b = left[name], right[name]
        assert [o.token_ids for o in a[0]] == [o.token_ids for o in b[0]], name


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DENSE, {}),
        (EXPERTS, {}),
        (DENSE, {"kv_cache_dtype": "int8"}),
        (DENSE, {"variants": ("int4",), "layer_precision": "0:int4"}),
        (EXPERTS, {"variants": ("int4",), "layer_precision": "1:int4"}),
        (DENSE | {"tie_word_embeddings": True}, {"prefix_caching": False}),
    ],
    ids=["dense", "experts", "int8 kv", "int4", "int4 experts", "tied"],
)
def test_answers_stay_the_same(tmp_path: Path, config: dict, options: dict) -> None:
    """Whether instances merge and split at once or layer by layer."""
    model = written(tmp_path, config)
    options = {"max_num_batched_tokens": 3 + 32} | options
    expected = answers(model, all_kinds, change=False, **options)
    for gradual in (False, True):
        same(answers(model, all_kinds, change=True, gradual=gradual, **options), expected)
