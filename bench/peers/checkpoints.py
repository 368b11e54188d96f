"""Random Llama checkpoints in Hugging Face layout: bf16 safetensors, one file per layer, written as they are made."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCAB = 32000
MAX_POSITION = 4096


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = VOCAB  # at least VOCAB, because prompts are random ids below it
    tied: bool = False  # whether the head is the embedding

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "160m": Shape(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2048),
    "1.1b": Shape(hidden=2048, layers=22, heads=32, kv_heads=4, intermediate=5632),
    # Shapes of published models: SmolLM2, Qwen2.5 (as a Llama) and Llama 3.2.
    "135m": Shape(hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49152, tied=True),
    "0.5b": Shape(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, vocab=151936, tied=True),
    "1.2b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, intermediate=8192, vocab=128256, tied=True),
}


def ensure_checkpoint(name: str, cache: Path, shape: Shape | None = None) -> Path:
    """Return the folder of the checkpoint `name` under `cache`, written if it is missing.

    `shape` is by default that of `SHAPES`.
    """
    path = cache / f"llama-{name}"
    if not (path / "model.safetensors.index.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        _write(shape or SHAPES[name], path)
    return path


def ensure_configuration(name: str, cache: Path, shape: Shape) -> Path:
    """Return the folder `name` under `cache` with a configuration and a tokenizer, for weights made at every start."""
    path = cache / f"llama-{name}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(shape)))
    write_tokenizer(path, shape.vocab)
    return path


def _write(shape: Shape, path: Path) -> None:
    """Write the index last: a checkpoint without an index is incomplete and is written again."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    (path / "config.json").write_text(json.dumps(hf_config(shape), indent=2))
    write_tokenizer(path, shape.vocab)
    weight_map, total = {}, 0
    for part, tensors in _parts(shape):
        arrays = {name: _random(rng, dims) for name, dims in tensors.items()}
        save_file(arrays, path / part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, part)
        total += sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _parts(shape: Shape) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """Yield the name of each file and the shapes of its tensors."""
    e, i, kv = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_dim
    yield "embed.safetensors", {"model.embed_tokens.weight": (shape.vocab, e)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield (
            f"layer-{layer:02d}.safetensors",
            {
                prefix + "self_attn.q_proj.weight": (e, e),
                prefix + "self_attn.k_proj.weight": (kv, e),
                prefix + "self_attn.v_proj.weight": (kv, e),
                prefix + "self_attn.o_proj.weight": (e, e),
                prefix + "mlp.gate_proj.weight": (i, e),
                prefix + "mlp.up_proj.weight": (i, e),
                prefix + "mlp.down_proj.weight": (e, i),
                prefix + "input_layernorm.weight": (e,),
                prefix + "post_attention_layernorm.weight": (e,),
            },
        )
    head = {} if shape.tied else {"lm_head.weight": (shape.vocab, e)}
    yield "head.safetensors", {"model.norm.weight": (e,), **head}


def _random(rng: np.random.Generator, dims: tuple[int, ...]) -> np.ndarray:
    """Return ones for a norm, and normal values with standard deviation 0.02 for other tensors."""
    import ml_dtypes

    if len(dims) == 1:
        return np.ones(dims, ml_dtypes.bfloat16)
    return (rng.standard_normal(dims, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16)


def hf_config(shape: Shape) -> dict:
    """Return the contents of the checkpoint's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def write_tokenizer(path: Path, vocab: int) -> None:
    """Write a tokenizer of `vocab` tokens: bytes, and names for the rest.

    Engines need one although prompts are token ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet]
    words += [f"<{token}>" for token in range(len(words), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={word: token for token, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
