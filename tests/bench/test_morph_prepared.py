"""Copies of checkpoints with variants that AWQ prepared, and models without a checkpoint."""

from types import SimpleNamespace

import pytest

import bench.quantization
from bench.morph_parts import prepared, presets
from bench.morph_parts.prepared import PRECISIONS, ensure_prepared, is_prepared
from bench.morph_parts.presets import BUNDLED, PRESETS, prompts_of, setup_of
from bench.peers.checkpoints import Shape, ensure_checkpoint
from jaxserve.checkpoint.variants import FOLDER, VariantStore

SHAPE = Shape(hidden=128, layers=1, heads=2, kv_heads=1, intermediate=128, vocab=300)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Return a small checkpoint; texts are short."""
    texts = [SimpleNamespace(text="def f(x):\n    return x + 1\n" * 40)]
    monkeypatch.setattr(bench.quantization, "texts", lambda: (texts, texts))
    return ensure_checkpoint("small", tmp_path, SHAPE)


def test_a_copy_is_prepared_by_awq_once_for_the_weights(model, tmp_path, monkeypatch):
    assert not is_prepared(model)
    copy = ensure_prepared(model, tmp_path / "awq")
    store = VariantStore.open(copy / FOLDER)
    assert {store.method(precision).name for precision in PRECISIONS} == {"awq"}
    assert is_prepared(copy)
    assert not (model / FOLDER).exists()
    assert copy.name == model.name

    commands = []
    monkeypatch.setattr(prepared, "_jaxserve", lambda *arguments: commands.append(arguments[0]))
    assert ensure_prepared(model, tmp_path / "awq") == copy
    assert commands == []
    other = ensure_checkpoint("other", tmp_path, Shape(128, 1, 2, 1, 256, vocab=300))
    for path in other.iterdir():
        path.replace(model / path.name)
    ensure_prepared(model, tmp_path / "awq")
    assert commands == ["quantize"], "the variants are of the weights before"


def test_a_copy_of_a_model_with_a_profile_gets_its_own(model, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(prepared, "_jaxserve", lambda *arguments: commands.append(arguments[:2]))
    monkeypatch.setattr(prepared, "is_prepared", lambda copy: True)
    (model / prepared.PROFILE).write_text("{}")
    copy = ensure_prepared(model, tmp_path / "awq")
    assert commands == [("profile", copy)]
    assert not (copy / prepared.PROFILE).exists()


@pytest.mark.parametrize("name", ["8b", "tiny"])
def test_a_model_without_a_checkpoint_has_a_configuration_and_prompts(name, tmp_path):
    setup = setup_of(name, tmp_path, awq=True, slo_ttft=1.0)
    assert setup.load_format == "dummy"
    assert {path.name for path in setup.model.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert max(prompts_of(name, setup.model).tokens) < PRESETS[name].shape.vocab


def test_the_bundled_model_is_served_from_a_copy_only_if_it_is_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "ensure_prepared", lambda model, folder, pieces: folder / model.name)
    plain, copy = (setup_of(BUNDLED, tmp_path, awq=awq, slo_ttft=2.0, kv_pages=60) for awq in (False, True))
    assert copy.model == tmp_path / "awq" / plain.model.name
    assert plain.kv_pages == copy.kv_pages == 60


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_pages_are_short_and_requests_fit(preset):
    assert sum(preset.fixed_lengths) <= preset.max_model_len
    assert preset.lengths.max_prompt_tokens + preset.lengths.max_answer_tokens <= preset.max_model_len
    pages = -(-sum(preset.fixed_lengths) // 16)
    assert preset.kv_pages < preset.max_num_seqs * pages, "slots would be short before pages"
    assert preset.at_once > preset.kv_pages // pages
