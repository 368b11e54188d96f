"""The same requests give the same sequence of plans on the real engine and in the simulator.

The real engine is a tiny model on four virtual devices. Its step log gives the arrivals, and the times of its steps,
which the simulated instances of the same names take one after the other. Compared are the instances after each regroup:
their names and their devices.
"""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.build import BuiltEngine, build
from jaxserve.control.plan import InstancePlan
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import StepLoad
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.step_log import Recording, read_log
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.sim.build import build_simulation
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.simulation import SimRequest
from tests.sim.machines import CPU

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 500,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGE_CPU = replace(CPU, memory=16 << 30)
OPTIONS = {"dp": 4, "max_tp": 4, "memory_gb": 8, "max_num_seqs": 2, "max_num_batched_tokens": 2 + 64, "warmup": False}
POLICY = "policy: tp_transform\nsettings: {hold: 0.3, release_horizon: 0.5}\n"
PAGES, PATIENCE = 60, 120.0

Plans = list[list[tuple[str, tuple[int, ...]]]]  # the instances (name, devices) after each change of their set


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "policy.yaml").write_text(POLICY)
    return EngineConfig(
        model=tmp_path,
        load_format="dummy",
        fuse=False,
        kv_pages=PAGES,
        policy=str(tmp_path / "policy.yaml"),
        step_log=tmp_path / "steps.jsonl",
        prefix_caching=False,
        **OPTIONS,
    )


class Served:
    """A real engine that is stepped until something is so, and the plans that were in force meanwhile."""

    def __init__(self, config: EngineConfig):
        self.built: BuiltEngine = build(config, controlled=True)
        built = self.built
        self.engine = SyncEngine(
            built.loops,
            built.info,
            None,
            built.clock,
            route=built.limits.route,
            max_model_len=built.limits.max_model_len,
            on_close=built.close,
        )
        built.connect(self.engine)
        self.plans: Plans = [instances_of(built.in_force.plan.instances)]
        built.in_force.follow(self._follow)

    def _follow(self) -> None:
        add_plan(self.plans, self.built.in_force.plan.instances)

    @property
    def settled(self) -> bool:
        assert self.built.control is not None
        return self.engine.idle and not self.built.control.status()["busy"]

    def ask(self, prompt_tokens: int, tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.engine.add(TokensPrompt((3,) * prompt_tokens), params)

    def step_until(self, done: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < ends, self.plans
            if self.engine.idle:
                time.sleep(0.01)
            self.engine.step()


def instances_of(instances: Sequence[InstancePlan]) -> list[tuple[str, tuple[int, ...]]]:
    return [(plan.name, plan.stages[0].devices) for plan in instances]


def add_plan(plans: Plans, instances: Sequence[InstancePlan]) -> None:
    """Append the instances of a plan, if they are others than before."""
    if instances_of(instances) != plans[-1]:
        plans.append(instances_of(instances))


def serve(config: EngineConfig) -> Plans:
    """Serve short requests and two long ones on the real engine, and return its plans."""
    served = Served(config)
    try:
        max_len = served.built.resolved.max_len
        served.ask(30, 900)  # on instance 0, so that instances 2 and 3 have less to do for a second or more
        served.ask(20, 4)
        snapshots = served.engine.snapshots
        served.step_until(lambda: snapshots()["0"].generated_tokens > 5 and snapshots()["1"].generated_tokens == 4)
        served.ask(max_len(1), 20)  # needs two instances
        served.step_until(lambda: len(served.plans) == 3 and served.settled)
        served.ask(30, 60)
        served.ask(max_len(2), 20)  # needs all four
        served.step_until(lambda: len(served.plans) == 5 and served.settled)
    finally:
        served.engine.close()
    return served.plans


class RecordedSteps:
    """A `TrueCostModel` in which each instance takes the recorded times of the instance of its name, in order."""

    host = 0.0

    def __init__(self, recording: Recording):
        names = {begun.instance: begun.name for begun in recording.instances}
        ended: dict[int, float] = {}
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        for step in recording.steps:
            start = max(step.begun, ended.get(step.instance, 0.0))
            self._times[names[step.instance]].append(step.ended - start)
            ended[step.instance] = step.ended

    def of(self, instance: InstancePlan) -> "RecordedInstance":
        return RecordedInstance(self._times[instance.name])


class RecordedInstance:
    """The remaining step times of one instance, the last of which stands for all that may follow."""

    per_context = None

    def __init__(self, times: deque[float]):
        self._times = times

    def seconds(self, load: StepLoad) -> float:
        return self._times.popleft() if len(self._times) > 1 else self._times[0]


def simulate(config: EngineConfig, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> Plans:
    """Simulate the requests of a log with its step times, and return the plans."""
    cluster: Cluster = resolve_cluster(config, ModelShape.load(config.model / "config.json"), LARGE_CPU)
    monkeypatch.setattr(Cluster, "true_costs", property(lambda self: RecordedSteps(recording)))
    built = build_simulation(cluster, detailed=False, interval=0.0, model_folder=Path(config.model))
    start = min(arrival.time for arrival in recording.arrivals)
    requests = [
        SimRequest(arrival.time - start, arrival.prompt_tokens, arrival.max_tokens)
        for arrival in sorted(recording.arrivals, key=lambda arrival: arrival.time)
    ]
    answers: list[Any] = []
    for answer in built.simulation.run(requests):
        answers.append(answer)
        if len(answers) == len(requests):
            built.sampler.finish()
    assert [answer.error for answer in answers] == [None] * len(requests)
    return [instances_of(each.instances) for each in built.control.sets]


def test_real_engine_and_simulator_have_the_same_plans(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = serve(config)
    recording = read_log(config.step_log)
    assert [len(plan) for plan in real] == [4, 3, 4, 1, 4]
    assert [regroup.error for regroup in recording.regroups] == [None] * 4
    assert len(recording.arrivals) == 5
    assert simulate(config, recording, monkeypatch) == real
