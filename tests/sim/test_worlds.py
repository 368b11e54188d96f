"""Worlds for properties of policies are what their names say, and are the same for the same seed."""

import pytest

from jaxserve.control import block_chain, parallel_plan
from jaxserve.core.step_load import StepLoad
from jaxserve.sim.cost_model import RooflineModel
from tests.sim.worlds import FULL, PROFILES, QUANTISED, SHAPE, SHORT, SPEEDS, world

SEEDS = range(12)


def relative(hardware, precision: str, tokens: int) -> float:
    """Return the time of a step's layers in a precision, relative to bfloat16."""

    def seconds(name: str) -> float:
        chain = block_chain(FULL, (name,) * SHAPE.num_layers, FULL)
        plan = parallel_plan(chain, kv_pages=2, tp=1, pp=1, dp=1, devices=1).instances[0]
        head = SHAPE.head_bytes(FULL) / hardware.bandwidth
        return RooflineModel(SHAPE, hardware).of(plan).seconds(StepLoad(tokens, 0, 0, 0, 0)) - head

    return (seconds(precision) - hardware.overheads.step) / (seconds(FULL) - hardware.overheads.step)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("speed", SPEEDS)
def test_fewer_bits_are_as_fast_as_the_world_says(seed: int, speed: str):
    hardware = world(seed, speed=speed).hardware
    for tokens, (least, most) in ((1, SPEEDS[speed][0]), (2048, SPEEDS[speed][1])):
        int8, int4, int3 = (relative(hardware, precision, tokens) for precision in QUANTISED)
        assert least - 1e-6 <= int4 <= most + 1e-6
        assert min(int4, 1) - 1e-6 <= int8 <= max(int4, 1) + 1e-6
        assert (int3 - int4) * (int4 - 1) >= -1e-6


def test_kinds_are_drawn_and_can_be_given():
    worlds = [world(seed) for seed in range(60)]
    assert {each.speed for each in worlds} == set(SPEEDS)
    assert {each.short for each in worlds} == set(SHORT)
    assert {each.hardware.platform for each in worlds} == {"cpu", "gpu"}
    given = world(3, speed="slower", short="slots", platform="gpu")
    assert (given.speed, given.short, given.hardware.platform) == ("slower", "slots", "gpu")


def test_pools_grow_in_segments_on_gpu_alone():
    on_cpu, on_gpu = (world(0, platform=platform).cluster("morph").memory for platform in ("cpu", "gpu"))
    assert on_cpu.granule
    assert not on_gpu.granule


@pytest.mark.parametrize("seed", [0, 5, 7])
def test_what_is_short_is_what_queues(seed: int):
    """Twice the slots help where slots are short, twice the pages where pages are."""
    for short in ("slots", "pages"):
        poor = world(seed, short=short, platform="gpu")
        traffic = poor.traffic(1.2, seed, seconds=30)
        same = poor.run("static", traffic)
        slots = poor.run("static", traffic, max_num_seqs=2 * poor.max_num_seqs)
        pages = poor.run("static", traffic, kv_pages=2 * poor.kv_pages)
        helped, other = (slots, pages) if short == "slots" else (pages, slots)
        assert helped.p95_ttft < same.p95_ttft
        assert other.p95_ttft > 0.95 * same.p95_ttft


def test_traffic_follows_load_and_seed():
    some = world(5)
    light, heavy = (some.traffic(load, 7) for load in (0.5, 2.0))
    assert light.name == heavy.name
    assert len(heavy) == pytest.approx(4 * len(light), rel=0.4)
    assert len(some.traffic(0.5, 7, instances=4)) == pytest.approx(4 * len(light), rel=0.4)
    assert (some.traffic(0.5, 7).arrival_s == light.arrival_s).all()
    assert {some.traffic(0.5, seed).name for seed in range(20)} == set(PROFILES)


def test_a_world_answers_all_and_the_same_twice():
    some = world(1, short="pages", platform="cpu", speed="faster")
    traffic = some.traffic(0.8, 1)
    first, second = (
        some.run("morph", traffic),
        world(1, short="pages", platform="cpu", speed="faster").run("morph", traffic),
    )
    assert first == second
    assert first.decisions > 0
    assert first.restored
    assert 0 <= first.violated <= 1


def test_instances_share_the_load():
    some = world(2, short="nothing")
    one = some.run("static", some.traffic(0.5, 3))
    four = some.run("static", some.traffic(0.5, 3, instances=4), instances=4)
    assert four.p95_ttft <= one.p95_ttft * 1.5 + 1
