"""Write what Hugging Face Transformers computes for the cases: python -m tests.golden.make_golden

Needs torch and transformers; the tests that read the files do not. For each case it searches the first seed whose
greedy tokens are clear (the best two logits are never close) and not a short loop. It keeps the names and shapes of the
checkpoint's tensors, a prompt, its logits and 64 greedy tokens.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

from tests.golden.cases import CASES, ROPE, STACKED_EXPERTS
from tests.golden.weights import write_checkpoint

HERE = Path(__file__).parent
PROMPT_TOKENS, NEW_TOKENS = 40, 64
MIN_MARGIN = 0.01  # between the two largest logits
MIN_DISTINCT = 16  # among the greedy tokens


def main() -> None:
    """Write golden.json and one .npy of logits for each case."""
    torch.set_num_threads(1)
    golden: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rope": {name: rope(parameters) for name, parameters in ROPE.items()},
        "cases": {},
    }
    for name, config in CASES.items():
        golden["cases"][name], logits = record(name, config)
        np.save(HERE / f"{name}.npy", logits)
        sys.stderr.write(f"{name}: seed {golden['cases'][name]['seed']}\n")
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


def record(name: str, config: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    """Return a case's entry in golden.json and its logits (float32[prompt tokens, vocabulary])."""
    with tempfile.TemporaryDirectory() as folder:
        shapes = tensor_shapes(Path(folder) / "shapes", config, name in STACKED_EXPERTS)
        for seed in range(1000):
            model = load(write_checkpoint(Path(folder) / "model", config, shapes, seed))
            prompt = np.random.RandomState(seed).randint(4, config["vocab_size"], PROMPT_TOKENS).tolist()
            tokens = list(clear(greedy(model, prompt)))
            if len(tokens) == NEW_TOKENS and len(set(tokens)) >= MIN_DISTINCT:
                break
        else:
            raise RuntimeError(f"{name}: no seed has clear greedy tokens")
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].numpy()
    return {"seed": seed, "tensors": shapes, "prompt": prompt, "greedy": tokens}, logits


def tensor_shapes(folder: Path, config: dict[str, Any], stacked_experts: bool) -> dict[str, list[int]]:
    """Return names and shapes as Transformers saves them, or as its module has them where experts are to be stacked."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    if stacked_experts:
        return {name: list(value.shape) for name, value in model.state_dict().items()}
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}


def load(directory: Path) -> torch.nn.Module:
    """Return the model in float32, and fail if a tensor was not used or not found."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def greedy(model: torch.nn.Module, prompt: list[int]) -> Iterator[tuple[int, float]]:
    """Return the most likely next token and its lead over the second, 64 times, computed without a cache."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        yield tokens[-1], float(best.values[0] - best.values[1])


def clear(steps: Iterator[tuple[int, float]]) -> Iterator[int]:
    """Return the tokens before the first near tie."""
    for token, margin in steps:
        if margin < MIN_MARGIN:
            return
        yield token


def rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return frequencies for heads of 64 and 128 numbers, and the factor on cosines and sines."""
    frequencies = []
    for head_dim in (64, 128):
        config = transformers.LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            max_position_embeddings=131072,
            rope_parameters={"rope_theta": 500000.0, **parameters},
        )
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        frequencies.append(rotary.inv_freq.tolist())
    return {"frequencies": frequencies, "scale": float(rotary.attention_scaling)}


if __name__ == "__main__":
    main()
