"""Writes the greedy answers of Transformers in float32, with which `make test-real` compares jaxserve's.

    python tests/real/transformers_numbers.py build/real/smollm2 > tests/real/transformers.json

It needs torch and transformers, which `make test-real` itself does not.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "The capital of Germany is Berlin. The capital of France is",
    "Water boils at 100 degrees. It freezes at",
    "def area(width, height):\n    return",
    "Once upon a time, there was a little fox who",
)
CHAT = "What is the capital of Germany?"
TOKENS = 24


def main(folder: str) -> None:
    """Print the prompts' tokens, the greedy tokens that follow and their log-probabilities."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": CHAT}], tokenize=False, add_generation_prompt=True
    )
    answers = [greedy(model, tokenizer(text, add_special_tokens=False).input_ids) for text in (*PROMPTS, chat)]
    sys.stdout.write(json.dumps(answers) + "\n")


@torch.no_grad()
def greedy(model, prompt: list[int]) -> dict[str, list]:
    """Return `TOKENS` tokens after a prompt, each the most likely one."""
    step, cache, tokens, logprobs = torch.tensor([prompt]), None, [], []
    for _ in range(TOKENS):
        output = model(step, past_key_values=cache, use_cache=True)
        row, cache = output.logits[0, -1].log_softmax(-1), output.past_key_values
        tokens.append(int(row.argmax()))
        logprobs.append(round(float(row.max()), 5))
        step = row.argmax().reshape(1, 1)
    return {"prompt": prompt, "tokens": tokens, "logprobs": logprobs}


if __name__ == "__main__":
    main(sys.argv[1])
