"""The server of the cluster demonstration: several instances of a small model, each with few KV pages."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxserve.bench.spawn import spawned
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import ConfigError

MODEL = Path(__file__).parents[2] / "examples/cluster-demo"  # random weights
NAME = "cluster-demo"
KV_HEADS = 8  # of the model: the largest degree
VIRTUAL, INSTANCES = 8, 4  # virtual devices, and instances on them
PAGES, PAGE = 32, 16  # KV pages of an instance, and tokens of a page
MOST_PAGES = 48  # of an instance; a group may have as many for each of its members
GROUP = 2  # instances that keep one copy of their layers together
POLICY = "tp_transform+param_drop"
READY_S = 300.0
COUNT_DEVICES = "import jax; print(0 if jax.default_backend() == 'cpu' else jax.device_count())"


@dataclass(frozen=True)
class Setup:
    """The number of instances of one device at the start, and the kind of their devices."""

    instances: int
    virtual: bool

    @classmethod
    def of(cls, devices: str) -> "Setup":
        """Return the setup for "virtual" devices, the machine's accelerators ("gpu"), or what there is ("auto").

        Raise ConfigError if there are too few.
        """
        count = 0 if devices == "virtual" else _accelerators()
        if count >= 2:
            return cls(min(1 << (count.bit_length() - 1), KV_HEADS), virtual=False)
        if devices == "gpu":
            raise ConfigError(f"instances merge on two devices or more: JAX finds {count} accelerators here")
        return cls(INSTANCES, virtual=True)

    @property
    def instance_tokens(self) -> int:
        """Tokens that the KV pages of one instance hold."""
        return PAGES * PAGE

    @property
    def service_tokens(self) -> int:
        """Tokens that the KV pages of all instances hold together."""
        return self.instances * self.instance_tokens

    def __str__(self) -> str:
        kind = f"{VIRTUAL} virtual devices of the CPU" if self.virtual else "accelerators"
        return f"{self.instances} instances on one device each, of {kind}"

    @contextmanager
    def started(self, cache: Path | None, log: Path, *more: str) -> Iterator[str]:
        """Start the server, yield its URL, and stop it at the end. `more`: further options of `jaxserve serve`.

        Raise SpawnError if it does not start.
        """
        args = [str(MODEL), "--load-format", "dummy", "--served-model-name", NAME]
        args += ["--tokenizer", str(bundled_model_path()), "--dp", str(self.instances), "--max-pp", str(GROUP)]
        args += ["--kv-pages", str(PAGES), "--max-kv-pages", str(MOST_PAGES), "--page-size", str(PAGE)]
        # Few shapes of steps, so that the programs of all placements are compiled soon.
        args += ["--max-num-seqs", "2", "--max-num-batched-tokens", "34", "--no-fuse"]
        args += ["--virtual-devices", str(VIRTUAL)] if self.virtual else []
        args += ["--compile-cache", str(cache)] if cache else []
        args += more
        with spawned(args, timeout_s=READY_S, log_path=log) as url:
            yield url


def _accelerators() -> int:
    """Return the number of the machine's accelerators, counted in a process of its own, as JAX takes their memory."""
    done = subprocess.run([sys.executable, "-c", COUNT_DEVICES], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0
