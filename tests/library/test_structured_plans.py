"""Structured answers follow their grammars on several devices, and while the plan of the engine changes."""

import asyncio
import json

import jsonschema

from jaxserve import LLM, ReasoningSection, SamplingParams, StructuredOutput
from jaxserve.build import build_async_engine
from jaxserve.core.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TextPrompt
from tests.library.adapting import until

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 8},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
STRUCTURED = StructuredOutput(json=SCHEMA)
PROMPTS = [f"def f{number}(" for number in range(8)]


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=300, structured=STRUCTURED)


def test_structured_answers_on_eight_devices_follow_their_schema():
    options = {"tp": 2, "pp": 2, "dp": 2, "max_num_seqs": 2, "max_model_len": 512, "memory_gb": 8}
    with LLM(max_num_batched_tokens=66, warmup=False, **options) as llm:
        outputs = llm.generate(PROMPTS, [params(seed) for seed in range(len(PROMPTS))], use_tqdm=False)
    for output in outputs:
        (answer,) = output.outputs
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)


async def answer(engine: AsyncEngine, asked: SamplingParams) -> str:
    text = ""
    async for output in engine.generate(TextPrompt(PROMPTS[asked.seed % len(PROMPTS)]), asked):
        text += output.outputs[0].text
    return text


def test_structured_answers_follow_their_schema_while_layers_and_pages_change():
    async def scenario() -> tuple[list[str], list[str], str]:
        config = EngineConfig(
            policy="manual",
            variants=("int4",),
            max_num_seqs=4,
            max_num_batched_tokens=68,
            max_model_len=512,
            kv_pages=40,
            max_kv_pages=60,
            memory_gb=4,
        )
        engine = build_async_engine(config)
        control = engine.control
        assert control is not None
        first = control.plan_yaml()
        other = first.replace("layers.0-7: bfloat16", "layers.0-7: int4").replace("kv_pages: 41", "kv_pages: 61")
        assert (other.count("int4"), other.count("61")) == (1, 1)
        answers: list[asyncio.Task[str]] = []
        for wanted in (other, first, other, first):
            answers += [asyncio.create_task(answer(engine, params(len(answers) + i))) for i in range(6)]
            version = control.status()["plan_version"]
            control.set_plan(wanted)
            await until(lambda version=version: control.status()["plan_version"] > version)
            await until(lambda: not control.status()["busy"])
        texts = await asyncio.gather(*answers)
        outcomes = [decision["outcome"] for decision in control.decisions(10)]
        section = ReasoningSection("<think>", "</think>", begun=True, max_tokens=4)
        limited = await answer(engine, SamplingParams(seed=0, max_tokens=20, ignore_eos=True, reasoning=section))
        await engine.shutdown()
        return texts, outcomes, limited

    texts, outcomes, limited = asyncio.run(scenario())
    assert "</think>" in limited
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(outcomes) >= 4
    assert set(outcomes) == {"done"}
