"""SmolLM2-135M-Instruct: the same tokens as Transformers, and losses of fewer bits as they were measured.

expected.json holds the losses, nats a token on the text of tests/real/text.py. transformers.json has its own script.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.calibration.pipeline import QuantizationSettings
from jaxserve.calibration.run import run
from jaxserve.checkpoint.variants import FOLDER, VariantStore
from jaxserve.cli.own_text import sampler
from tests.real.text import rows

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())
ROWS, LENGTH = 8, 512
GROUP = 32
TOLERANCE = 0.03  # nats a token that a loss may exceed the committed one
TEXT_TOLERANCE = 0.1  # the same in full precision, because versions of Python differ in some sentences


def engine(folder: Path, **options) -> LLM:
    return LLM(folder, max_model_len=LENGTH + 2, max_num_seqs=8, warmup=False, **options)


def loss(folder: Path, **options) -> float:
    """Return the cross-entropy of the text as an engine computes it, in nats a token."""
    with engine(folder, **options) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate(rows(llm.tokenizer, ROWS, LENGTH).tolist(), params, use_tqdm=False)
    pairs = [pair for o in outputs for pair in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True)]
    return float(np.mean([-entry[token].logprob for token, entry in pairs]))


@pytest.fixture(scope="module")
def full(smollm2: Path) -> float:
    return loss(smollm2)


def test_greedy_tokens_and_their_probabilities_are_those_of_transformers(smollm2: Path) -> None:
    answers = json.loads((HERE / "transformers.json").read_text())
    params = SamplingParams(temperature=0, max_tokens=len(answers[0]["tokens"]), logprobs=0, ignore_eos=True)
    with engine(smollm2, dtype="float32") as llm:
        outputs = llm.generate([answer["prompt"] for answer in answers], params, use_tqdm=False)
    for output, answer in zip(outputs, answers, strict=True):
        (found,) = output.outputs
        assert list(found.token_ids) == answer["tokens"]
        chosen = [entry[token].logprob for token, entry in zip(found.token_ids, found.logprobs, strict=True)]
        np.testing.assert_allclose(chosen, answer["logprobs"], atol=2e-3)


def test_full_precision_reads_english_as_it_was_measured(full: float) -> None:
    assert full == pytest.approx(EXPECTED["full"], abs=TEXT_TOLERANCE)


@pytest.mark.parametrize("precision", ["int8", "int4", "int3"])
def test_rounded_layers_lose_no_more_than_was_measured(smollm2: Path, full: float, precision: str) -> None:
    lost = loss(smollm2, precision=precision, head_precision="bfloat16") - full
    assert lost < EXPECTED["rounding"][precision] + TOLERANCE


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_methods_on_the_models_own_text_lose_less_than_rounding(
    smollm2: Path, full: float, method: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in smollm2.iterdir():
        if file.is_file():
            os.symlink(file, folder / file.name)
    settings = QuantizationSettings(("int4", "int3"), method, GROUP)
    result = run(folder, settings, sample=sampler(folder, lambda what, steps: lambda: None))
    for precision in settings.precisions:
        measured = VariantStore.open(folder / FOLDER).loss(precision)
        assert measured == result.losses[precision]
        assert measured.method < 0.9 * measured.rounding
        lost = loss(folder, precision=precision, head_precision="bfloat16") - full
        assert lost < 0.85 * EXPECTED["rounding"][precision]
    shutil.rmtree(folder)
