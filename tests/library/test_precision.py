"""Weights in fewer bits: any assignment of precisions runs, gives what its weights give, and takes the stated bytes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams
from jaxserve.build import build
from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.planning.resolve import resolve
from jaxserve.quantization import QArray
from tests.golden.cases import CASES
from tests.support.reference import LENGTH, Reference

OPTIONS = {"load_format": "dummy", "warmup": False, "max_num_seqs": 4, "memory_gb": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
MIXTURES = [
    {"precision": "int8"},
    {"precision": "int4"},
    {"precision": "int3"},
    {"layer_precision": "0-0:auto,1-:int4"},
    {"precision": "int8", "layer_precision": "0:int3,2:auto"},
    {"precision": "int4", "head_precision": "float32"},
    {"head_precision": "int4"},
]


def precisions(model: Path, options: dict) -> tuple[dict[int, str], str]:
    """Return the precisions of the layers and of the head."""
    (instance,) = resolve(EngineConfig(model=model, **(OPTIONS | options))).plan.instances
    return dict(enumerate(instance.layer_precisions)), instance.blocks[-1].precision


def check(llm: LLM, reference: Reference, vocab: int, tolerance: float) -> None:
    """Check that the engine's tokens and log-probabilities are those of the same QArrays without an engine."""
    prompts = [np.random.default_rng(i).integers(3, vocab, 5 + 60 * i).tolist() for i in range(2)]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        (answer,) = output.outputs
        expected = reference.logprobs(prompt + list(answer.token_ids))
        assert answer.logprobs is not None
        for i, token in enumerate(answer.token_ids):
            row = expected[len(prompt) + i - 1]
            assert row[token] == pytest.approx(row.max(), abs=tolerance)  # the likeliest, but for ties
            assert answer.logprobs[i][token].logprob == pytest.approx(row[token], abs=tolerance)


@pytest.mark.parametrize("options", MIXTURES, ids=str)
def test_mixed_precision_answers_equal_those_of_the_same_weights(tiny_model: Path, options: dict) -> None:
    reference = Reference(tiny_model, *precisions(tiny_model, options))
    with LLM(tiny_model, **OPTIONS, **options) as llm:
        check(llm, reference, 499, 1e-3)


@pytest.mark.parametrize("name", ["llama_linear_biases", "mistral_window", "qwen3_moe"])
def test_every_family_runs_in_mixed_precision(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES[name]))
    options = {"layer_precision": "0:int8,1:int4,2:int3", "dtype": "float32"}
    reference = Reference(tmp_path, {0: "int8", 1: "int4", 2: "int3"}, dtype="float32")
    with LLM(tmp_path, **OPTIONS, **options) as llm:
        check(llm, reference, 130, 2e-3)


def test_quantised_tied_embedding_is_shared_with_the_head(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"precision": "int8", "dtype": "float32"}
    reference = Reference(tmp_path, dict.fromkeys(range(config["num_hidden_layers"]), "int8"), "int8", dtype="float32")
    built = build(EngineConfig(model=tmp_path, **OPTIONS, **options))
    embed, *_, head = built.instances[0].executor.blocks
    shared = {id(leaf) for leaf in embed.leaves} & {id(leaf) for leaf in head.leaves}
    built.close()
    assert len(shared) == 2, "codes and scales"
    with LLM(tmp_path, **OPTIONS, **options) as llm:
        check(llm, reference, config["vocab_size"], 1e-3)


def test_quantised_layer_keeps_its_norms_in_full_precision(tiny_model: Path) -> None:
    reference = Reference(tiny_model, {0: "int4"})
    layer, full = reference.blocks["layers.0"], reference.blocks["layers.1"]
    for matrix in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
        assert isinstance(matrix[...], QArray)
        assert matrix[...].bits == 4
    assert layer.input_norm.weight[...].dtype == full.attention.qkv[...].dtype == np.float32
    assert not isinstance(reference.blocks["head"].weight[...], QArray)


@pytest.mark.parametrize("options", MIXTURES, ids=str)
def test_ledger_and_metrics_count_bytes_by_precision(tiny_model: Path, options: dict) -> None:
    built = build(EngineConfig(model=tiny_model, **OPTIONS, **options))
    steps = built.instances[0]
    held = sum(leaf.nbytes for loaded in steps.executor.blocks for leaf in loaded.leaves)
    snapshot = steps.core.snapshot
    layers = list(precisions(tiny_model, options)[0].values())
    try:
        assert built.resolved.ledger.entries["weights"] == snapshot.weight_bytes == held
        assert snapshot.layers_by_precision == {name: layers.count(name) for name in layers}
        metrics = built.metrics.render().decode()
        for name in set(layers):
            line = f'jaxserve_layers_by_precision{{engine="0",model_name="{tiny_model.name}",precision="{name}"}}'
            assert f"{line} {float(layers.count(name))}" in metrics
    finally:
        built.close()


def test_precision_changes_exactly_the_matrices_bytes() -> None:
    taken = {}
    for precision, bits in (("auto", 16), ("int8", 8), ("int4", 4), ("int3", 3)):
        resolved = resolve(EngineConfig(precision=precision, head_precision="bf16", memory_gb=3))
        model = resolved.checkpoint.config
        sizes = (model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads), 3 * model.intermediate_size)
        quantised = model.num_layers * model.hidden_size * sum(sizes)
        scales = 0 if bits == 16 else 16 / 128
        taken[precision] = resolved.ledger.entries["weights"] - quantised * (bits + scales) / 8
    assert len(set(taken.values())) == 1, "all but the matrices is the same"


def test_quantised_loading_holds_one_layers_temporaries() -> None:
    """The test counts what numpy allocates besides the arrays that stay."""
    import tracemalloc

    from jaxserve.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(bundled_model_path())
    layer = sum(a.nbytes for a in checkpoint.block("layers.0").values())
    tracemalloc.start()
    try:
        kept = [checkpoint.variant(f"layers.{n}", "int4") for n in range(checkpoint.config.num_layers)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = sum(leaf.nbytes for block in kept for leaf in jax.tree.leaves(block))
    assert peak < held + 20 * layer  # of which float32 copies of the matrix at hand are the most


@pytest.fixture(scope="module")
def text() -> list[int]:
    source = (Path(__file__).parent / "source.txt").read_text()
    return Tokenizer.load(bundled_model_path()).encode(source[2000:])[:LENGTH]


@pytest.fixture(scope="module")
def full(text: list[int]) -> np.ndarray:
    """Log-probabilities of the bundled model in full precision."""
    return Reference(bundled_model_path(), load_format="auto").logprobs(text)


@pytest.mark.parametrize(
    ("precision", "agreement", "divergence"), [("int8", 0.95, 0.001), ("int4", 0.80, 0.1), ("int3", 0.70, 0.3)]
)
def test_quantised_bundled_model_stays_near_full_precision(
    text: list[int], full: np.ndarray, precision: str, agreement: float, divergence: float
) -> None:
    layers = dict.fromkeys(range(8), precision)
    quantised = Reference(bundled_model_path(), layers, load_format="auto").logprobs(text)
    assert np.mean(full.argmax(-1) == quantised.argmax(-1)) > agreement
    kl = np.mean(np.sum(np.exp(full) * (full - quantised), axis=-1))
    assert 0 < kl < divergence


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int5"},
        {"layer_precision": "0-99:int4"},
        {"layer_precision": "0-1:int4,1-2:int8"},
        {"variants": ("int8", "half")},
        {"head_precision": "int5"},
        {"precision": "bfloat16"},  # the model is in float32
    ],
    ids=str,
)
def test_invalid_precision_option_is_refused_before_loading(tiny_model: Path, options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LLM(tiny_model, **OPTIONS, **options)
