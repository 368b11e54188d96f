"""Makes a folder in Hugging Face layout from a GGUF file of the llama architecture, for tests of real weights.

It needs the packages gguf, numpy, ml_dtypes, safetensors and tokenizers:

    python tests/real/convert.py MODEL.gguf FOLDER
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Tensors of a layer, and whether rows of each head are interleaved as llama.cpp rotates them.
LAYER = {
    "attn_norm": ("input_layernorm", None),
    "attn_q": ("self_attn.q_proj", "head_count"),
    "attn_k": ("self_attn.k_proj", "head_count_kv"),
    "attn_v": ("self_attn.v_proj", None),
    "attn_output": ("self_attn.o_proj", None),
    "ffn_norm": ("post_attention_layernorm", None),
    "ffn_gate": ("mlp.gate_proj", None),
    "ffn_up": ("mlp.up_proj", None),
    "ffn_down": ("mlp.down_proj", None),
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3  # the type of special tokens in GGUF


class Metadata:
    """The key-value pairs of a GGUF file."""

    def __init__(self, reader: GGUFReader):
        self._fields = reader.fields
        self.architecture = self["general.architecture"]

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` if the file has none."""
        return self[key] if key in self._fields else default

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return a value whose key begins with the architecture."""
        return self.get(f"{self.architecture}.{key}", default)


def convert(source: Path, folder: Path) -> None:
    """Write config.json, model.safetensors in bfloat16, and the tokenizer's files."""
    reader = GGUFReader(source)
    metadata = Metadata(reader)
    if metadata.architecture != "llama" or metadata["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"{source}: only llama with a byte-level BPE tokenizer can be converted")
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tensors(reader, metadata))
    write_json(folder / "config.json", config(metadata, tied="lm_head.weight" not in weights))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = tokenizer(metadata)
    tokens.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


def tensors(reader: GGUFReader, metadata: Metadata) -> Iterator[tuple[str, np.ndarray]]:
    """Yield all tensors in bfloat16 by their names in Hugging Face's layout."""
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name, _, kind = tensor.name.rpartition(".")
        if name.startswith("blk."):
            _, index, part = name.split(".")
            renamed, heads = LAYER[part]
            name = f"model.layers.{index}.{renamed}"
            if heads is not None:
                values = split_halves(values, metadata.of_model(f"attention.{heads}"))
        elif name in OUTSIDE:
            name = OUTSIDE[name]
        else:
            continue  # frequencies of the rotation, which follow from config.json
        yield f"{name}.{kind}", np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)


def split_halves(w: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection whose heads are rotated in halves, from one in which neighbouring rows are pairs."""
    return w.reshape(heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def config(metadata: Metadata, *, tied: bool) -> dict[str, Any]:
    """Return the contents of config.json."""
    of, heads = metadata.of_model, metadata.of_model("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": of("rope.dimension_count", of("embedding_length") // heads),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
    }


def tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer: byte-level BPE that splits numbers into digits, as SmolLM's does."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    made.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL])
    return made


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json: the special tokens and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    known = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    special = {name: tokens[metadata[f"tokenizer.ggml.{key}"]] for name, key in known.items()}
    return {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.of_model("context_length"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def write_json(path: Path, contents: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
