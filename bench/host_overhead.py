"""Host work per decode step, as `jaxserve.bench.offline.host` measures it: `python -m bench.host_overhead`."""

import argparse

from jaxserve.bench.environment import describe
from jaxserve.bench.offline.host import host_work
from jaxserve.bench.offline.options import HostOptions


def main() -> None:
    """Prints the medians in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=300)
    options = HostOptions(**vars(parser.parse_args()))
    print(f"batch {options.batch}, {options.layers} layers, {options.steps} decode steps, microseconds")
    for row in host_work(options):
        print(f"  {row['part']:34} median {row['median_us']:7.0f}   p90 {row['p90_us']:7.0f}")
    for key, value in describe().items():
        print(f"- {key}: {value}")


if __name__ == "__main__":
    main()
