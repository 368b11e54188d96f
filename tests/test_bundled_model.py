"""The bundled model: complete and small, a tokenizer that loses nothing, and Python that can be recognised."""

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, strategies as st

from checkpoints.train.objective import build, token_losses
from checkpoints.train.products import in_bfloat16
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import ModelConfig
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.models import build_block
from jaxserve.models.dense import forward
from tests.support.thorough import some

MODEL = bundled_model_path()
TRAIN = Path(__file__).parents[1] / "checkpoints" / "train" / "train.py"
LENGTH = 160  # every sequence is padded to this, so that one compilation serves all
MAX_BYTES = 20_000_000

SNIPPET = '''\
import os


class Cache:
    """Keep the results of a function in a directory."""

    def __init__(self, path, maxsize=None):
        self.path = path
        self.maxsize = maxsize
        self._lock = threading.Lock()

    def get(self, key, default=None):
        """Return the value for key, or default if there is none."""
        filename = os.path.join(self.path, key)
        try:
            with open(filename, 'rb') as f:
                return f.read()
        except FileNotFoundError:
            return default
'''

Logits = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(MODEL, dtype="float32")


@pytest.fixture(scope="module")
def logits(checkpoint: Checkpoint) -> Logits:
    """The dense forward pass as a function from at most LENGTH token ids to logits (float32[tokens, V])."""
    blocks = {block_id: load_block(checkpoint, block_id) for block_id in checkpoint.config.block_ids}
    run = jax.jit(lambda tokens: forward(checkpoint.config, blocks, tokens))
    return lambda ids: np.asarray(run(jnp.asarray(ids + [0] * (LENGTH - len(ids)), jnp.int32)))[: len(ids)]


def load_block(checkpoint: Checkpoint, block_id: str) -> nnx.Module:
    config = checkpoint.config
    graph, state = nnx.split(nnx.eval_shape(lambda: build_block(config, block_id, rngs=nnx.Rngs(0))))
    tensors = checkpoint.block(block_id)
    leaves = [jnp.asarray(tensors[".".join(map(str, path))]) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def greedy(logits: Logits, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """Return the prompt and its most likely continuation."""
    ids = tokenizer.encode(prompt)
    for _ in range(count):
        ids.append(int(logits(ids)[-1].argmax()))
    return tokenizer.decode(ids)


def test_bundled_checkpoint_is_complete_and_fits_in_a_wheel():
    names = {file.name for file in MODEL.iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert expected | {"README.md"} <= names
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= MAX_BYTES


def test_bundled_model_is_a_small_bfloat16_llama_with_grouped_heads(checkpoint: Checkpoint):
    config = open_checkpoint(MODEL).config
    assert (config.architecture, config.dtype, config.tie_embeddings) == ("LlamaForCausalLM", "bfloat16", True)
    assert config.num_kv_heads < config.num_heads
    assert config.num_layers >= 8
    tensors = [checkpoint.block(block_id) for block_id in config.block_ids if block_id != "head"]
    assert 5e6 < sum(x.size for block in tensors for x in block.values()) < 10e6


def test_bundled_configurations_agree_on_special_tokens(tokenizer: Tokenizer):
    config = json.loads((MODEL / "config.json").read_text())
    names = json.loads((MODEL / "tokenizer_config.json").read_text())
    for kind in ("bos", "eos", "pad"):
        assert tokenizer.token(config[f"{kind}_token_id"]) == names[f"{kind}_token"]
    assert tokenizer.vocab_size == config["vocab_size"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\x00",
        "a\x00b\n\t\r\n",
        "naïve 漢字 \U0001f600\U0001f469‍\U0001f680",
        "\u200b\ufeff\x7f",
        "def f():\n\tpass\n",
    ],
)
def test_bundled_tokenizer_round_trips_text(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=200))
def test_bundled_tokenizer_round_trips_any_text_without_special_tokens(text: str):
    tokenizer = LOADED
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert not {0, 1} & set(ids)


LOADED = Tokenizer.load(MODEL)  # hypothesis allows no fixture narrower than the session's


def test_bundled_tokenizer_begins_prompts_as_training_documents(tokenizer: Tokenizer):
    assert tokenizer.encode("x = 1")[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in tokenizer.encode("x = 1", add_special_tokens=False)


def test_bundled_chat_template_writes_a_python_module(tokenizer: Tokenizer):
    messages = [{"role": "system", "content": "Sorting"}, {"role": "user", "content": "def sort(items):"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == "<|endoftext|># Sorting\ndef sort(items):\n"


def test_bundled_model_predicts_unseen_python_better_than_chance(logits: Logits, tokenizer: Tokenizer):
    ids = tokenizer.encode(SNIPPET)
    logprobs = jax.nn.log_softmax(logits(ids)[:-1], axis=-1)
    loss = -float(np.mean(np.asarray(logprobs)[np.arange(len(ids) - 1), ids[1:]]))
    assert loss < MAX_LOSS < math.log(tokenizer.vocab_size)


MAX_LOSS = 1.8  # nats a token; 1.42 when it was made


UNDERTRAINED = pytest.mark.xfail(reason="it falls into a loop inside the docstring")


@pytest.mark.parametrize(
    "prompt",
    some(
        [
            "def main():",
            "class Stack:\n    def __init__(self):",
            "def read_file(path):",
            pytest.param("def fibonacci(n):\n", marks=UNDERTRAINED),
        ],
        2,
    ),
)
def test_bundled_models_greedy_text_parses_as_python(logits: Logits, tokenizer: Tokenizer, prompt: str):
    text = greedy(logits, tokenizer, prompt, count=48)
    lines = text[: text.rindex("\n") + 1].rstrip().splitlines()
    while lines[-1].endswith(":"):  # the limit on tokens cut its block off
        lines = "\n".join(lines[:-1]).rstrip().splitlines()
    assert len(lines) > len(prompt.splitlines())
    ast.parse("\n".join(lines))


def test_training_loss_equals_that_of_the_serving_forward_pass():
    config = ModelConfig("LlamaForCausalLM", 97, 32, 2, 4, 2, 16, 64, 512, tie_embeddings=True, dtype="float32")
    graph, params = build(config, seed=0)
    rows = jax.random.randint(jax.random.key(1), (2, 257), 0, config.vocab_size)
    blocks = dict(nnx.merge(graph, params).items())
    expected = [-jax.nn.log_softmax(forward(config, blocks, row[:-1]))[jnp.arange(256), row[1:]] for row in rows]
    np.testing.assert_allclose(token_losses(config, graph, params, rows), jnp.concatenate(expected), rtol=1e-4)


def test_training_products_in_bfloat16_keep_the_gradient():
    config = ModelConfig("LlamaForCausalLM", 96, 32, 2, 4, 2, 16, 64, 512, tie_embeddings=True, dtype="float32")
    graph, params = build(config, seed=0)
    rows = jax.random.randint(jax.random.key(1), (2, 33), 0, config.vocab_size)

    def loss(params: nnx.State, rows: jax.Array) -> jax.Array:
        return token_losses(config, graph, params, rows).mean()

    exact, rounded = (jax.jit(jax.grad(f))(params, rows) for f in (loss, in_bfloat16(loss)))
    difference = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)), exact, rounded)
    assert 0 < max(jax.tree.leaves(difference)) < 0.05


def test_training_script_prints_its_help():
    environment = {**os.environ, "PYTHONPATH": str(TRAIN.parents[2])}  # where jaxserve is not installed
    done = subprocess.run([sys.executable, TRAIN, "--help"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "--stdlib" in done.stdout
    assert "--minutes" in done.stdout
