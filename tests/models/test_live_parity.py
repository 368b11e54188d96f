"""Logits and greedy tokens next to those of Transformers, on prompts and weights that are not stored.

Skipped without torch and transformers, which the `dev` extra does not install. tests/models/test_parity.py compares
stored results and always runs.
"""

import numpy as np
import pytest

from tests.golden.cases import CASES
from tests.golden.model import Golden, Model, golden, relative_error

NEEDS = "needs torch and transformers: pip install torch transformers"
torch = pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("transformers", reason=NEEDS)


@pytest.mark.parametrize("name", CASES)
def test_fresh_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path):
    from tests.golden.make_golden import clear, greedy, load

    stored = golden(name)
    case = Golden(name, stored.seed + 1000, stored.tensors, [], [])
    path = case.write(tmp_path)
    prompt = np.random.RandomState(7).randint(4, 131, 30).tolist()
    theirs, ours = load(path), Model(path)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].numpy()
    assert relative_error(ours.logits(prompt), expected) < 1e-4
    tokens = list(clear(greedy(theirs, prompt)))  # up to a near tie
    assert ours.greedy(prompt, len(tokens)) == tokens
