"""llama.cpp through llama-cpp-python's C interface: unlike its Python classes, it decodes many sequences at once."""

import json
import sys
from pathlib import Path

import numpy as np

from bench.peers.workload import MAX_LENGTH, VOCAB, Prompts

LOG_LEVEL_ERROR = 4  # ggml_log_level


class LlamaCpp:
    """llama.cpp on a bf16 GGUF made from the same checkpoint; greedy sampling by numpy's argmax over its logits."""

    def __init__(self, model: Path, threads: int, max_batch: int):
        import llama_cpp

        self._c = llama_cpp
        self._log = llama_cpp.llama_log_callback(_log_errors)  # kept: C holds only a pointer to it
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        weights = llama_cpp.llama_model_load_from_file(
            str(ensure_gguf(model)).encode(), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = MAX_LENGTH * max_batch
        options.n_seq_max = max_batch
        options.n_batch = options.n_ubatch = 2048
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(weights, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not load {model}")
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        answers: list[list[int]] = [[] for _ in prompts]
        newest = prompts
        position = 0
        for _ in range(max_tokens):
            chosen = self._step(newest, position)
            position += len(newest[0])
            newest = [[token] for token in chosen]
            for answer, token in zip(answers, chosen, strict=True):
                answer.append(token)
        return answers

    def _step(self, tokens: Prompts, position: int) -> list[int]:
        """Feeds every sequence's tokens, all of one length, and returns each one's most likely next token."""
        batch, last = self._batch, []
        batch.n_tokens = 0
        for sequence, row in enumerate(tokens):
            for offset, token in enumerate(row):
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token, position + offset
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = offset == len(row) - 1
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
        status = self._c.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return [int(self._logits(i).argmax()) for i in last]

    def _logits(self, index: int) -> np.ndarray:
        return np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, index), (VOCAB,))


def _log_errors(level: int, text: bytes, _: object) -> None:
    """llama.cpp tells a great deal; only errors matter here."""
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
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


def ensure_gguf(model: Path) -> Path:
    """The checkpoint as one bf16 GGUF file beside it; writes it if it is not there yet."""
    path = model / "model-bf16.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        _write_gguf(model, partial)
        partial.rename(path)
    return path


def _write_gguf(model: Path, path: Path) -> None:
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
            if array.ndim == 1:  # norms are float32 in GGUF; bf16 is the upper half of a float32
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
    """Query and key rows from halves (Hugging Face) to pairs (llama.cpp), within each head."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return array
    head_dim, width = config["head_dim"], array.shape[1]
    return array.reshape(-1, 2, head_dim // 2, width).swapaxes(1, 2).reshape(-1, width)
