"""The compared engines, with one interface. Each imports its packages when it is created, in its own process."""

from pathlib import Path

from bench.peers.ggufs import TYPES
from bench.peers.llamacpp import LlamaCpp
from bench.peers.workload import Engine, Prompts

PAGE_SIZE = 16


class Jaxserve:
    """jaxserve through its library, as a user calls it, with as much KV cache as the batch can fill."""

    def __init__(self, model: Path, precision: str, threads: int, max_batch: int, max_tokens_per_sequence: int):
        from jaxserve import LLM, SamplingParams

        self._params = SamplingParams
        pages = max_batch * -(-max_tokens_per_sequence // PAGE_SIZE) + 1
        limits = {
            "max_model_len": max_tokens_per_sequence,
            "max_num_seqs": max_batch,
            "kv_pages": pages,
            "page_size": PAGE_SIZE,
        }
        self._llm = LLM(model, dtype="bfloat16", precision=precision, **limits)
        # The library does not report the size of its weights.
        loaded = [block for loop in self._llm._engine.loops.values() for block in loop.executor.blocks]
        self.weight_bytes = sum(block.nbytes for block in loaded if block.block != "embed")

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        params = self._params(temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """Hugging Face Transformers: one static batch, SDPA attention, bf16, torch's own threads."""

    def __init__(self, model: Path, precision: str, threads: int, max_batch: int, max_tokens_per_sequence: int):
        assert precision == "bf16", precision
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None
        embedding = self._model.get_input_embeddings().weight
        is_head = embedding is self._model.get_output_embeddings().weight
        self.weight_bytes = sum(p.nbytes for p in self._model.parameters()) - (0 if is_head else embedding.nbytes)

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        tokens = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            output = self._model.generate(
                tokens,
                attention_mask=self._torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return output[:, tokens.shape[1] :].tolist()


ENGINES: dict[str, type[Engine]] = {"jaxserve": Jaxserve, "transformers": Transformers, "llama.cpp": LlamaCpp}
PRECISIONS = {"jaxserve": ("bf16", "int8", "int4"), "transformers": ("bf16",), "llama.cpp": tuple(TYPES)}
NEEDS = {"jaxserve": ("jax",), "transformers": ("torch", "transformers"), "llama.cpp": ("llama_cpp", "gguf")}
