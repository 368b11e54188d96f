"""llama.cpp through the C interface of llama-cpp-python, which can decode many sequences at once.

Its Python classes cannot. With AMX, the product with quantised weights ends some builds with SIGSEGV (llama.cpp's issue
20824). Built with CMAKE_ARGS="-DCMAKE_CXX_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'", and the same
CMAKE_C_FLAGS, llama.cpp multiplies by AVX-512 instead. Products with bf16 weights do not use AMX in either build.
"""

from pathlib import Path

import numpy as np

from bench.peers.ggufs import ensure_gguf, log_errors_only, step_bytes
from bench.peers.workload import Prompts


class LlamaCpp:
    """llama.cpp on a GGUF file of the checkpoint, with greedy sampling by numpy's argmax over its logits."""

    def __init__(self, model: Path, precision: str, threads: int, max_batch: int, max_tokens_per_sequence: int):
        import llama_cpp

        file = ensure_gguf(model, precision)
        self.weight_bytes = step_bytes(file)
        self._c = llama_cpp
        self._log = log_errors_only()
        llama_cpp.llama_backend_init()
        weights = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = max_tokens_per_sequence * max_batch
        options.n_seq_max = max_batch
        options.n_ubatch = 2048  # tokens computed at once
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(weights, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not load {file}")
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
        """Feed every sequence's tokens, all of one length, and return the most likely next token of each."""
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
        return np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, index), (self._vocab,))
