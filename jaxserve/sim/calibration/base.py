"""The hardware that a measured run is fitted from: a file, the file of the machine's GPU, or a nominal CPU."""

from collections.abc import Collection
from dataclasses import replace

from jaxserve.planning.defaults import PLATFORMS
from jaxserve.sim.calibration.measured import MeasuredRun
from jaxserve.sim.hardware import Curve, Hardware, Link, hardware_of_gpus, load_hardware

BANDWIDTH, RATE = 2e10, 2e11  # bytes/s and operations/s of a nominal CPU, from which the fit begins
MEMORY = 64 << 30  # bytes
NOMINAL = "nominal"
PRECISIONS = ("float32", "bfloat16", "int8", "int4", "int3")


def base_hardware(name: str | None, run: MeasuredRun) -> Hardware:
    """Return the hardware of a name or a file, by default that of the machine that the run was made on.

    Raise `ConfigError` if it is unknown.
    """
    if name is not None:
        return load_hardware(name)
    return nominal_cpu(run.memory or MEMORY) if run.gpus is None else load_hardware(hardware_of_gpus(run.gpus))


def nominal_cpu(memory: int = MEMORY) -> Hardware:
    """Return a CPU with round numbers. Only what is fitted says anything about a real one."""
    shapes = PLATFORMS["cpu"]
    return Hardware(
        name="cpu",
        source=NOMINAL,
        measured=False,
        platform="cpu",
        memory=memory,
        bandwidth=BANDWIDTH,
        rates=dict.fromkeys(PRECISIONS, RATE),
        efficiency=dict.fromkeys((*PRECISIONS, "attention"), Curve(((1, 1.0),))),
        devices_per_host=1,
        tile=shapes.tile,
        prefill_tokens=shapes.prefill_tokens,
        max_num_seqs=shapes.max_num_seqs,
        min_rows=shapes.min_rows,
        links={"pcie": Link(BANDWIDTH / 2, 0.0)},
    )


def with_precisions(hardware: Hardware, precisions: Collection[str]) -> Hardware:
    """Return the hardware with these precisions alone, as far as it has them."""
    kept = {name: curve for name, curve in hardware.efficiency.items() if name in precisions or name == "attention"}
    rates = {name: rate for name, rate in hardware.rates.items() if name in precisions}
    return replace(hardware, rates=rates, efficiency=kept)
