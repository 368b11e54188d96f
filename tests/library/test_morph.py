"""A burst from end to end: layers lose precision, pages are added, all requests are answered, and all goes back."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxserve.build import build_async_engine
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import EngineStopped, PlanError, RequestError
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TokensPrompt
from jaxserve.kernels.native import kv as native
from jaxserve.planning.resolve import resolve
from tests.library.adapting import OPTIONS, QUICK, burst_until, until

PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump({"policy": "morph-performance", "settings": QUICK}))
    return path


def prompt(seed: int) -> TokensPrompt:
    return TokensPrompt(tuple(np.random.default_rng(seed).integers(3, 499, 60).tolist()))


async def answer(engine: AsyncEngine, seed: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    async for output in engine.generate(prompt(seed), PARAMS):
        tokens += output.outputs[0].token_ids
    return tokens


def shows_its_ledger(engine: AsyncEngine) -> bool:
    """Return whether the newest sample of the history adds up to what the ledger has now."""
    assert engine.control is not None
    sample, status = engine.control.history()[-1], engine.control.status()
    parts = ("weight_bytes", "kv_used_bytes", "kv_free_bytes", "kv_rounding_bytes", "other_bytes")
    assert sample["budget"] == status["budget"]
    return not status["busy"] and sum(sample[part] for part in parts) == sum(status["ledger"].values())


@pytest.mark.parametrize("elastic", [True, False])
def test_burst_swaps_layers_and_quiet_restores_the_first_plan(
    tiny_model: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    if not elastic:  # pools take memory in segments, as on GPU
        monkeypatch.setattr(native, "supports_elastic_pools", lambda: False)

    async def scenario() -> None:
        engine = build_async_engine(EngineConfig(model=tiny_model, policy=str(policy), **OPTIONS))
        assert engine.control is not None
        full = engine.control.status()
        alone = await answer(engine, 0)
        await asyncio.sleep(0.5)
        assert engine.control.decisions(10) == [], "nothing happens without pressure"
        burst = await burst_until(
            lambda: engine.snapshot().layers_by_precision.get("int4", 0) > 0, lambda seed: answer(engine, seed)
        )
        gone = burst.pop()
        gone.cancel()
        assert {len(tokens) for tokens in await asyncio.gather(*burst)} == {100}
        most = max(decision["target_version"] for decision in engine.control.decisions(100))
        assert most > full["plan_version"]
        assert any("KV 21 ->" in decision["reason"] for decision in engine.control.decisions(100))
        await until(lambda: engine.control.status()["layers"] == full["layers"] and not engine.control.status()["busy"])
        after = engine.control.status()
        assert after["kv_pages"] == full["kv_pages"]
        assert after["ledger"] == full["ledger"]
        await until(lambda: shows_its_ledger(engine))
        assert {decision["outcome"] for decision in engine.control.decisions(100)} == {"done"}
        assert all(decision["reason"] for decision in engine.control.decisions(100))
        assert await answer(engine, 0) == alone, "as before the burst"
        await engine.shutdown()

    asyncio.run(scenario())


def test_operators_plan_comes_into_force_until_the_policy_returns(tiny_model: Path, policy: Path) -> None:
    async def scenario() -> None:
        engine = build_async_engine(EngineConfig(model=tiny_model, policy=str(policy), **OPTIONS))
        control = engine.control
        assert control is not None
        wanted = control.plan_yaml().replace("layers.0-2: float32", "layers.0: int4\n      layers.1-2: float32")
        assert wanted != control.plan_yaml()
        control.set_plan(wanted)
        await until(lambda: engine.snapshot().layers_by_precision.get("int4") == 1)
        assert control.status()["policy"] == "manual"
        assert len(await answer(engine, 1)) == 100
        await until(lambda: shows_its_ledger(engine))
        control.set_policy("static")
        await until(lambda: "int4" not in engine.snapshot().layers_by_precision)
        assert str(policy) in control.status()["policies"]
        policy.unlink()
        control.set_policy(str(policy))  # it is not read again
        assert control.status()["policy"] == "morph-performance"
        await engine.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "variants"),
    [
        (None, ("int8", "float32")),
        ({"precision": "int8"}, ("int8", "float32")),
        ({}, ("int4", "int8", "float32")),
        ({"rest": ""}, ("int4", "float32")),
    ],
)
def test_policy_variants_are_prepared_without_being_named(
    tiny_model: Path, tmp_path: Path, settings: dict | None, variants: tuple[str, ...]
) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"policy": "morph", "settings": settings}))
    policy = "morph-int8" if settings is None else str(tmp_path / "own.yaml")
    config = EngineConfig(model=tiny_model, load_format="dummy", policy=policy)
    assert resolve(config).variants == variants
    more = resolve(replace(config, variants=("int3",))).variants  # besides, and behind: the first gives the swap order
    assert more == (*variants[:-1], "int3", variants[-1])


def test_engine_without_a_policy_shows_and_changes_its_plan(tiny_model: Path) -> None:
    async def scenario() -> None:
        engine = build_async_engine(EngineConfig(model=tiny_model, **OPTIONS | {"max_kv_pages": 40}))
        control = engine.control
        assert control is not None
        assert (control.status()["policy"], control.decisions(10)) == ("static", [])
        control.set_plan(control.plan_yaml().replace("kv_pages: 21", "kv_pages: 33"))
        await until(lambda: control.status()["kv_pages"]["total"] == 32)
        assert len(await answer(engine, 1)) == 100
        with pytest.raises(RequestError, match="without int4, int8: start it with --policy morph"):
            control.set_policy("morph")
        with pytest.raises(PlanError, match="41"):
            control.set_plan(control.plan_yaml().replace("kv_pages: 33", "kv_pages: 100"))
        await engine.shutdown()

    asyncio.run(scenario())


def test_shutdown_during_a_burst_ends_every_request(tiny_model: Path, policy: Path) -> None:
    async def scenario() -> None:
        engine = build_async_engine(EngineConfig(model=tiny_model, policy=str(policy), **OPTIONS))
        control = engine.control
        assert control is not None
        burst = await burst_until(lambda: control.status()["busy"], lambda seed: answer(engine, seed))
        await engine.shutdown()
        results = await asyncio.gather(*burst, return_exceptions=True)
        assert all(isinstance(result, EngineStopped) or len(result) == 100 for result in results)
        assert any(isinstance(result, EngineStopped) for result in results)

    asyncio.run(scenario())
