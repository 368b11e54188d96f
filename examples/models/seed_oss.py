"""An example of a model family: Seed-OSS, a Llama with biases on queries, keys and values, and switches for the others.

    python examples/models/seed_oss.py           # run a tiny one with random weights
    python examples/models/seed_oss.py FOLDER    # run a real one

`register()` is all that a program needs to load the family. In jaxserve itself it would be two rows in
jaxserve/models/registry.py.
"""

import json
import sys
import tempfile
from pathlib import Path

from jaxserve import LLM, SamplingParams
from jaxserve.core.config import ModelConfig
from jaxserve.models import hf, registry

TINY = {
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 1e7,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}


def config_from_hf(config: hf.Json) -> ModelConfig:
    """Read a SeedOssForCausalLM config.json."""
    return ModelConfig(
        architecture="SeedOssForCausalLM",
        **hf.common_fields(config),
        qkv_bias=hf.optional_bool({"attention_bias": True, **config}, "attention_bias"),
        o_bias=hf.optional_bool(config, "attention_out_bias"),
        mlp_bias=hf.optional_bool(config, "mlp_bias"),
    )


def register() -> None:
    """Make jaxserve load this family, in this process."""
    registry.register_family("SeedOssForCausalLM", config_from_hf, model_type="seed_oss")


def main() -> None:
    """Generate a few tokens with a real model, or with random weights."""
    register()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        given = {"model": sys.argv[1]} if sys.argv[1:] else {"model": folder, "load_format": "dummy"}
        with LLM(**given, max_num_seqs=1, warmup=False) as llm:
            (answer,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=8))
    print(answer.outputs[0].token_ids)


if __name__ == "__main__":
    main()
