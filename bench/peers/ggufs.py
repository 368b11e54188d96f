"""GGUF files of a checkpoint, for llama.cpp: `python -m bench.peers.ggufs MODEL bf16 int8 int4`.

The bf16 file is the checkpoint in another format. llama.cpp quantises that file by its own rules: in Q4_0, for example,
the head is in Q6_K.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TYPES = {"bf16": "bf16", "int8": "Q8_0", "int4": "Q4_0"}  # llama.cpp's names of precisions
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
NAMES = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": HEAD,
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}

LOG_LEVEL_ERROR = 4  # ggml_log_level


def main() -> None:
    """Write the files that are missing."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.ggufs", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a checkpoint of bench.peers")
    parser.add_argument("precisions", nargs="+", choices=TYPES)
    args = parser.parse_args()
    for precision in args.precisions:
        print(_write(args.model, precision))


def ensure_gguf(model: Path, precision: str) -> Path:
    """Return the checkpoint's GGUF file, written next to it if it is missing.

    Another process writes it, so that this process's memory is that of the engine alone. Raise CalledProcessError.
    """
    path = gguf_path(model, precision)
    if not path.exists():
        command = [sys.executable, "-m", "bench.peers.ggufs", str(model), precision]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return path


def gguf_path(model: Path, precision: str) -> Path:
    """Return the path of the file, whether it exists or not."""
    return model / f"model-{TYPES[precision]}.gguf"


def step_bytes(path: Path) -> int:
    """Return the bytes of the weights that a decode step reads.

    These are all weights but the embedding, of which a step reads one row, unless it is also the head.
    """
    import gguf

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    return sum(sizes.values()) - (sizes[EMBEDDING] if HEAD in sizes else 0)


def log_errors_only() -> Any:
    """Send llama.cpp's errors to standard error and drop its other messages.

    Keep the returned callback alive: C holds only a pointer to it.
    """
    import llama_cpp

    callback = llama_cpp.llama_log_callback(_log_error)
    llama_cpp.llama_log_set(callback, None)
    return callback


def _log_error(level: int, text: bytes, _: object) -> None:
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def _write(model: Path, precision: str) -> Path:
    path = gguf_path(model, precision)
    if not path.exists():
        partial = path.with_suffix(".partial")
        if precision == "bf16":
            _convert(model, partial)
        else:
            _quantize(_write(model, "bf16"), partial, TYPES[precision])
        partial.rename(path)
    return path


def _quantize(source: Path, path: Path, name: str) -> None:
    # With the defaults of llama.cpp's own quantisation program.
    import llama_cpp

    log = log_errors_only()
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options))
    del log
    if status != 0:
        raise RuntimeError(f"llama.cpp could not quantise {source} to {name}: status {status}")


def _convert(model: Path, path: Path) -> None:
    import gguf
    from safetensors import deserialize

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    _add_sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for part in sorted(model.glob("*.safetensors")):
        for name, tensor in deserialize(part.read_bytes()):
            array = np.frombuffer(tensor["data"], np.uint16).reshape(tensor["shape"])
            if array.ndim == 1:
                # Norms are float32 in GGUF, and bf16 is the upper half of a float32.
                writer.add_tensor(_gguf_name(name), (array.astype(np.uint32) << 16).view(np.float32))
            else:
                array = np.ascontiguousarray(_rope_order(name, array, config))
                writer.add_tensor(_gguf_name(name), array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer, config: dict) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def _rope_order(name: str, array: np.ndarray, config: dict) -> np.ndarray:
    """Reorder the rows of queries and keys, within each head, from halves (Hugging Face) to pairs (llama.cpp)."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return array
    head_dim, width = config["head_dim"], array.shape[1]
    return array.reshape(-1, 2, head_dim // 2, width).swapaxes(1, 2).reshape(-1, width)


if __name__ == "__main__":
    main()
