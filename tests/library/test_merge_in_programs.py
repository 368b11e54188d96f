"""Programs whose engines merge instances: a script with `LLM`, and a process with no spare device."""

import os
import subprocess
import sys
from pathlib import Path

from jaxserve import LLM, SamplingParams
from tests.library.test_merge import DENSE, prompt_of, written
from tests.support.internals import engine_of
from tests.support.reference import Reference

OPTIONS = {
    "load_format": "dummy",
    "dp": 4,
    "max_tp": 4,
    "memory_gb": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 2 + 32,
    "kv_pages": 6,
    "max_kv_pages": 6,
    "warmup": False,
    "fuse": False,
}


def test_llm_answers_a_prompt_longer_than_the_pool_of_an_instance(tmp_path: Path) -> None:
    model = written(tmp_path, DENSE)
    with LLM(model, policy="tp_transform", **OPTIONS) as llm:
        assert engine_of(llm).info.instance_len == 96
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        prompts = [prompt_of(1, 200), prompt_of(2, 20), prompt_of(3, 30)]
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        reference = Reference(model)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.outputs[0].token_ids == reference.greedy(prompt, 10)


SCRIPT = """
import sys
from pathlib import Path
from jaxserve.core.sampling import SamplingParams
from tests.support.regrouped import Regrouped
engine = Regrouped(Path(sys.argv[1]), max_num_seqs=2, max_num_batched_tokens=34)
import jax
assert len(jax.devices()) == 4
params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, prompt_logprobs=1, logprobs=1)
for number in range(6):
    engine.add([3 + (number * 7 + i) % 400 for i in range(20 + 9 * number)], params)
pairs = [lambda e: e.merge("0", "1"), lambda e: e.merge("2", "3")]
engine.run([*pairs, lambda e: e.merge(*e.names), lambda e: e.split(e.names[0], 4)], every=4)
engine.check_idle()
engine.close()
print("done")
"""


def test_regroups_with_exactly_the_devices_that_a_plan_needs_block_no_program(tmp_path: Path) -> None:
    """A program waits for all of its devices, each of which takes a thread of XLA's."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, written(tmp_path, DENSE)],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.stdout.endswith("done\n"), run.stderr[-2000:]
