"""Hardware for tests: a CPU and a GPU with round numbers, and clusters of the bundled model on them."""

from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig
from jaxserve.planning.defaults import PLATFORMS
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import Curve, Hardware, Link, Overheads
from jaxserve.sim.shape import ModelShape

FULL = Curve(((1, 1.0),))
PRECISIONS = ("bfloat16", "int8", "int4", "int3")


def machine(platform: str, memory: int, bandwidth: float, rate: float, **more) -> Hardware:
    defaults = PLATFORMS[platform]
    return Hardware(
        name=f"test-{platform}",
        source="round numbers",
        measured=False,
        platform=platform,
        memory=memory,
        bandwidth=bandwidth,
        rates=dict.fromkeys(PRECISIONS, rate),
        efficiency=dict.fromkeys((*PRECISIONS, "attention"), FULL),
        devices_per_host=8,
        tile=defaults.tile,
        prefill_tokens=defaults.prefill_tokens,
        max_num_seqs=defaults.max_num_seqs,
        min_rows=defaults.min_rows,
        **more,
    )


CPU = machine("cpu", 4 << 30, 20e9, 200e9, links={"nvlink": Link(1e9, 1e-5)})
GPU = machine(
    "gpu",
    80 << 30,
    2e12,
    300e12,
    overheads=Overheads(step=1e-3, host=1e-3, request=1e-3),
    links={"pcie": Link(25e9, 1e-5), "nvlink": Link(200e9, 1e-5), "rdma": Link(20e9, 1e-5)},
)


def resolved(hardware: Hardware, **options) -> Cluster:
    """Return a cluster of the bundled model, with any options of an `EngineConfig`."""
    config = EngineConfig(**{"prefix_caching": False} | options)
    return resolve_cluster(config, ModelShape.load(bundled_model_path()), hardware)
