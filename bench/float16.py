"""The CPU time of float16 checkpoints in each compute dtype: `python -m bench.float16 [--out FILE]`.

Checkpoints with random weights and Qwen2-0.5B's widths, in the formats of Llama 2 (plain) and AutoAWQ (int4, groups of
128), are served in each dtype by engines in one process, which take turns in alternating order. The figure is the
process's CPU time, the least of several rounds, per generated token of one sequence and per token of a prompt.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from jaxserve.bench.environment import describe_environment
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.models import config_from_hf

DTYPES = ("auto", "bfloat16", "float32", "float16")
GROUP = 128
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "eos_token_id": 2,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def main() -> None:
    """Print a table, and write the figures to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated per round")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the timed prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jax.devices()  # starts XLA with all of its threads before any dtype is measured
    result: dict[str, Any] = {
        "environment": describe_environment(),
        "options": vars(options) | {"out": None},
        "cpu_ms_per_token": {},
    }
    for kind in ("plain", "awq"):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), options.layers, options.vocab, awq=kind == "awq")
            result["cpu_ms_per_token"][kind] = measured(Path(folder), options)
        for dtype, times in result["cpu_ms_per_token"][kind].items():
            print(kind, dtype, ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write(folder: Path, layers: int, vocab: int, *, awq: bool) -> None:
    """Write a checkpoint of random weights. Every random word is valid as AWQ codes."""
    rng = np.random.default_rng(0)
    hf = CONFIG | {"num_hidden_layers": layers, "vocab_size": vocab} | ({"quantization_config": AWQ} if awq else {})
    config, tensors = config_from_hf(hf), dict[str, np.ndarray]()
    for name, shape in (item for block in config.block_ids for item in tensor_shapes(config, block).items()):
        if awq and name.endswith("_proj.weight"):
            (outputs, inputs), weight = shape, name.removesuffix(".weight")
            tensors[f"{weight}.qweight"] = words(rng, inputs, outputs // 8)
            tensors[f"{weight}.qzeros"] = words(rng, inputs // GROUP, outputs // 8)
            tensors[f"{weight}.scales"] = np.full((inputs // GROUP, outputs), 0.004, np.float16)
        else:
            values = np.ones(shape) if name.endswith("norm.weight") else 0.02 * rng.standard_normal(shape, np.float32)
            tensors[name] = values.astype(np.float16)
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def words(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return words of eight random codes."""
    return rng.integers(-(1 << 31), 1 << 31, (rows, columns)).astype(np.int32)


def measured(folder: Path, options: argparse.Namespace) -> Mapping[str, dict[str, float]]:
    """Return CPU milliseconds by dtype: "decode" per generated token, "prefill" per token of a prompt."""
    prompt = np.random.default_rng(1).integers(3, options.vocab, options.prompt).tolist()
    times: dict[str, dict[str, float]] = {dtype: {} for dtype in DTYPES}
    with ExitStack() as stack:
        options_of_llm = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1 + 64,
            "max_model_len": 512,
            "prefix_caching": False,
        }
        llms = {dtype: stack.enter_context(LLM(folder, dtype=dtype, memory_gb=3, **options_of_llm)) for dtype in DTYPES}
        for number in range(options.rounds):
            for dtype, llm in list(llms.items())[:: 1 if number % 2 else -1]:
                first = cpu_ms(llm, prompt, 1)
                decode = (cpu_ms(llm, prompt, 1 + options.tokens) - first) / options.tokens
                for name, ms in (("decode", decode), ("prefill", first / len(prompt))):
                    times[dtype][name] = min(times[dtype].get(name, np.inf), ms)
    return times


def cpu_ms(llm: LLM, prompt: list[int], tokens: int) -> float:
    """Return the process's CPU time (ms) for one request."""
    began = time.process_time()
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return 1e3 * (time.process_time() - began)


if __name__ == "__main__":
    main()
