"""The examples of the pages for contributors run, and stand unchanged in these pages."""

import json
import re
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path

import jax
import pytest

from jaxserve.core.errors import CheckpointError
from jaxserve.models import registry
from jaxserve.parsing.plugins import tool_formats
from tests.parsing.writers import calls_of, parsed

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "add-a-model.md": "models/seed_oss.py",
    "add-a-parser.md": "parsers/call_tags.py",
    "add-a-kernel.md": "kernels/rms_norm.py",
}
ARGUMENTS = {"now": "{}", "get_weather": '{"city": "<Zürich>", "days": 3}'}


def example(path: str) -> dict:
    """Return the names that an example defines."""
    return runpy.run_path(str(ROOT / "examples" / path))


def output_of(path: str, folder: Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_examples_as_they_are(page: str):
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    assert programs
    code = (ROOT / "examples" / PAGES[page]).read_text()
    assert not [program for program in programs if program not in code]


def test_model_family_of_the_example_generates(tmp_path):
    tokens = output_of("models/seed_oss.py", tmp_path)
    assert re.fullmatch(r"\((\d+, ){7}\d+\)\n", tokens)


def test_registered_family_is_read_and_cannot_be_registered_twice(monkeypatch):
    for table in ("FAMILIES", "MODEL_TYPES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    names = example("models/seed_oss.py")
    tiny = names["TINY"]
    with pytest.raises(CheckpointError, match="SeedOssForCausalLM is not supported"):
        registry.config_from_hf(tiny)
    names["register"]()
    config = registry.config_from_hf(tiny)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    assert registry.config_from_hf({**tiny, "architectures": None}) == config
    assert registry.is_headless({**tiny, "architectures": ["SeedOssModel"]})
    with pytest.raises(ValueError, match="known already"):
        names["register"]()


def test_parser_of_the_example_runs(tmp_path):
    expected = 'text: \'I will look.\'\nweather({"city": "Oslo"})\nnow({})\n'
    assert output_of("parsers/call_tags.py", tmp_path) == expected


def test_parser_of_the_example_is_a_plugin():
    assert list(tool_formats(ROOT / "examples" / "parsers" / "call_tags.py")) == ["call_tags"]


def test_parser_of_the_example_reads_what_its_grammar_writes():
    form = example("parsers/call_tags.py")["CallTags"]()
    calls = [f"{form.before(name)}{arguments}{form.after()}" for name, arguments in ARGUMENTS.items()]
    text = "Well.\n" + form.separator.join(calls)
    for cut in range(len(text)):
        message = parsed(form, text[:cut], text[cut:])
        assert message.text == "Well."
        assert calls_of(message) == [(name, json.loads(arguments)) for name, arguments in ARGUMENTS.items()]


def test_parser_of_the_example_leaves_text_that_is_no_call():
    form = example("parsers/call_tags.py")["CallTags"]()
    assert calls_of(parsed(form, '<call name="f"> {"a": 1}</call>')) == [("f", {"a": 1})]
    text = 'Write <call name="f" or <call name=""> or <call> or <call name="f">text</call>.'
    assert parsed(form, text).text == text


def test_kernel_of_the_example_computes_what_its_reference_does():
    names = example("kernels/rms_norm.py")
    if not names["is_registered"]():
        pytest.skip("needs a C++ compiler")
    for (rows, columns), dtype in product([(1, 1), (5, 300), (64, 33)], ("float32", "bfloat16")):
        x = jax.random.normal(jax.random.key(0), (rows, columns), dtype)
        weight = jax.random.normal(jax.random.key(1), (columns,), dtype)
        assert names["supports"](x) == (dtype == "float32")
        got, expected = jax.jit(names["rms_norm"])(x, weight), names["reference"](x, weight)
        assert got.dtype == dtype
        assert abs(got - expected).max() <= 1e-5 * abs(expected).max()
    lowered = jax.jit(names["rms_norm"]).lower(jax.numpy.ones((2, 4)), jax.numpy.ones(4)).as_text()
    assert names["TARGET"] in lowered
