"""The simulator repeats what a real engine did under a burst, with its swaps and restores."""

import asyncio
from pathlib import Path

import numpy as np
import yaml

from jaxserve.build import build_async_engine
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.step_log import Recording, read_log
from jaxserve.sim.recorded import replay
from tests.library.adapting import OPTIONS, QUICK, burst_until, until


async def answer(engine: AsyncEngine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = TokensPrompt(tuple(rng.integers(3, 499, rng.integers(5, 100)).tolist()))
    params = SamplingParams(temperature=0, max_tokens=int(rng.integers(20, 100)), ignore_eos=True)
    async for _ in engine.generate(prompt, params):
        pass


def recorded(model: Path, folder: Path) -> Recording:
    """Record a calm time, a burst, and the time until the first plan is restored."""
    policy, log = folder / "quick.yaml", folder / "steps.jsonl"
    policy.write_text(yaml.safe_dump({"policy": "morph-performance", "settings": QUICK}))

    async def scenario() -> None:
        engine = build_async_engine(EngineConfig(model=model, policy=str(policy), step_log=log, **OPTIONS))
        control = engine.control
        assert control is not None
        full = control.status()["layers"]
        for seed in range(3):
            await answer(engine, seed)
        await asyncio.gather(
            *await burst_until(lambda: control.status()["layers"] != full, lambda seed: answer(engine, 3 + seed))
        )
        await until(lambda: control.status()["layers"] == full and not control.status()["busy"])
        await asyncio.sleep(0.5)
        await engine.shutdown()

    asyncio.run(scenario())
    return read_log(log)


def test_replay_repeats_every_step_and_decision_of_a_real_run(tiny_model: Path, tmp_path: Path) -> None:
    recording = recorded(tiny_model, tmp_path)
    assert len(recording.decisions) >= 2
    assert any("-> int4" in text for decided in recording.decisions for text in decided.transitions)
    again = replay(recording)
    assert again.decisions == recording.decisions
    assert again.steps == len(recording.steps)
    assert again.plan.version == recording.decisions[-1].target_version
