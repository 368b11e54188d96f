"""Hardware files are read strictly and written as they are read. Those of configs/hardware are valid."""

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from jaxserve.core.bundled import config_names, configs_path
from jaxserve.core.errors import ConfigError
from jaxserve.planning.defaults import PLATFORMS
from jaxserve.sim.hardware import Curve, Link, Overheads, from_yaml, load_hardware, to_yaml

TEXT = """
name: small
source: a test
measured: true
platform: cpu
memory: 1000
bandwidth: 2.0e+9
rates: {bfloat16: 1.0e+12, int4: 2.0e+12}
efficiency: {bfloat16: {1: 0.5, 100: 0.9}, int4: 0.6, attention: 0.7}
links: {pcie: {bandwidth: 10.0, latency: 0.5}}
devices_per_host: 2
"""
FILES = config_names("hardware")


def test_a_curve_is_linear_in_the_logarithm_between_knots_and_flat_outside():
    curve = Curve(((4, 0.2), (64, 0.6), (256, 0.4)))
    assert curve(1) == curve(4) == 0.2
    assert curve(16) == pytest.approx(0.4)
    assert curve(64) == pytest.approx(0.6)
    assert curve(128) == pytest.approx(0.5)
    assert curve(1e6) == 0.4


def test_a_number_is_a_share_that_holds_for_all():
    hardware = from_yaml(TEXT)
    assert [hardware.curve("int4")(tokens) for tokens in (1, 77, 1e6)] == [0.6] * 3
    assert hardware.curve("bfloat16")(10) == pytest.approx(0.7)


def test_what_is_left_out_is_nothing_or_the_platforms():
    hardware = from_yaml(TEXT)
    defaults = PLATFORMS["cpu"]
    assert hardware.overheads == Overheads(0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert (hardware.tile, hardware.prefill_tokens) == (defaults.tile, defaults.prefill_tokens)
    assert (hardware.max_num_seqs, hardware.min_rows) == (defaults.max_num_seqs, defaults.min_rows)
    assert hardware.head_curve is None
    assert hardware.decode_share == hardware.prefill_share == 0.7


def test_step_shapes_can_be_others():
    hardware = from_yaml(TEXT + "tile: 8\nmax_num_seqs: 5\n")
    assert (hardware.tile, hardware.max_num_seqs, hardware.min_rows) == (8, 5, 1)


def test_sixteen_bits_are_alike():
    hardware = from_yaml(TEXT)
    assert hardware.rate("float16") == hardware.rate("bfloat16")
    assert hardware.curve("float16") == hardware.curve("bfloat16")


def test_a_precision_that_the_hardware_lacks_is_an_error():
    with pytest.raises(ConfigError, match="small: rates lack 'int3': choose from bfloat16, int4"):
        from_yaml(TEXT).rate("int3")
    with pytest.raises(ConfigError, match="small: efficiency lack"):
        from_yaml(TEXT).curve("float32")


def test_devices_are_linked_by_the_best_that_there_is():
    pcie, nvlink, rdma = Link(10.0, 0.5), Link(100.0, 0.1), Link(5.0, 0.0)
    hardware = from_yaml(TEXT)
    assert hardware.link(0, 1) == hardware.link(3, 2) == pcie
    with pytest.raises(ConfigError, match="small has no link between devices of two hosts: add rdma"):
        hardware.link(1, 2)
    more = replace(hardware, links={"pcie": pcie, "nvlink": nvlink, "rdma": rdma})
    assert (more.link(0, 1), more.link(1, 2)) == (nvlink, rdma)
    assert nvlink.seconds(50) == pytest.approx(0.6)


def test_hardware_is_written_as_it_is_read():
    hardware = from_yaml(TEXT + "overheads: {step: 0.001, sequence: 1.0e-6}\n")
    assert from_yaml(to_yaml(hardware)) == hardware


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_configs_is_sound(name: str):
    hardware = load_hardware(name)
    assert hardware == load_hardware(configs_path("hardware") / f"{name}.yaml") == from_yaml(to_yaml(hardware))
    assert hardware.name == name
    assert len(hardware.source) > 20
    for precision in ("bfloat16", "int8", "int4", "int3"):
        assert hardware.rate(precision) > hardware.bandwidth
        assert all(0 < share < 1 for _, share in hardware.curve(precision).knots)
    assert 0 < hardware.decode_share < 1
    assert hardware.overheads.layer > 0


def test_the_gpus_that_are_not_at_hand_say_so():
    gpus = {"l4", "l4-marlin", "a100-40", "a100-80", "a800", "h800", "h100", "h20"}
    assert {*gpus, "h200"} == set(FILES)
    assert not any(load_hardware(name).measured for name in gpus)
    assert load_hardware("h200").measured


def test_capacities_of_the_gpus_are_those_of_the_data_sheets():
    for name, memory, bandwidth, rate in (
        ("l4", 24, 300, 121),
        ("a100-40", 40, 1555, 312),
        ("a100-80", 80, 2039, 312),
        ("a800", 80, 2039, 312),
        ("h100", 80, 3350, 989),
        ("h800", 80, 3350, 989),
        ("h200", 141, 4800, 989),
        ("h20", 96, 4000, 148),
    ):
        hardware = load_hardware(name)
        assert hardware.memory == pytest.approx(memory * 2**30, rel=0.07), name
        assert hardware.bandwidth == pytest.approx(bandwidth * 1e9)
        assert hardware.rate("bfloat16") == pytest.approx(rate * 1e12)


def test_hardware_that_is_not_there_is_an_error_with_what_is():
    with pytest.raises(ConfigError, match=r"unknown hardware 'tpu-v9'.*a100-40, a100-80"):
        load_hardware("tpu-v9")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory: 1000", "memory: 1e3", "memory is '1e3'"),
        ("memory: 1000", "memory: 10.5", "memory is 10.5"),
        ("bandwidth: 2.0e+9", "bandwidth: -1", "bandwidth is -1: it must be a finite number above 0"),
        ("measured: true", "measured: maybe", "measured is 'maybe'"),
        ("platform: cpu", "platform: abacus", "unknown platform 'abacus': choose from cpu, gpu"),
        ("source: a test\n", "", "lacks source"),
        ("name: small", "nane: small", "lacks name"),
        ("devices_per_host: 2", "devices_per_host: 2\ncolour: red", "has the unknown field 'colour'"),
        ("int4: 2.0e+12", "int5: 2.0e+12", "rates has the unknown field 'int5'"),
        ("rates: {bfloat16: 1.0e+12, ", "rates: {", "rates has int4: it must have one of bfloat16"),
        ("int4: 0.6, ", "", "efficiency lacks int4"),
        (", attention: 0.7", "", "efficiency lacks attention"),
        ("attention: 0.7", "attention: {1: 0.7}", "efficiency.attention is a mapping by tokens"),
        (
            "{1: 0.5, 100: 0.9}",
            "{100: 0.9, 1: 0.5}",
            "efficiency.bfloat16 has tokens 100, 1: they must ascend",
        ),
        ("{1: 0.5, 100: 0.9}", "{}", "efficiency.bfloat16 is empty"),
        ("{1: 0.5, 100: 0.9}", "{1: 0}", "efficiency.bfloat16.1 is 0"),
        ("{1: 0.5, 100: 0.9}", "{one: 0.5}", "efficiency.bfloat16 is 'one'"),
        ("latency: 0.5", "latency: -0.5", "links.pcie.latency is -0.5: it must be a finite number of at least 0"),
        ("latency: 0.5", "delay: 0.5", "links.pcie lacks latency"),
        ("pcie:", "wifi:", "links has the unknown field 'wifi'"),
        ("devices_per_host: 2", "devices_per_host: 2\noverheads: {nap: 1}", "overheads has the unknown field 'nap'"),
        ("devices_per_host: 2", "devices_per_host: 2\noverheads: {step: .inf}", "overheads.step is inf"),
        ("devices_per_host: 2", "devices_per_host: 2\noverheads: 3", "overheads is 3"),
        ("devices_per_host: 2", "devices_per_host: [", "not valid YAML"),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_field(tmp_path: Path, old: str, new: str, message: str):
    assert old in TEXT
    file = tmp_path / "bad.yaml"
    file.write_text(TEXT.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_hardware(file)
    assert message in str(caught.value)
    assert "bad.yaml" in str(caught.value)


def test_a_knot_between_two_is_their_mean_at_the_geometric_mean_of_tokens():
    curve = Curve(((10, 0.3), (1000, 0.7)))
    assert curve(sqrt(10 * 1000)) == pytest.approx(0.5)
