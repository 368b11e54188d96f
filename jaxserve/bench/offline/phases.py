"""A process that starts an engine and times its phases: `python -m jaxserve.bench.offline.phases '{...}'`.

Its argument holds the fields of an `EngineConfig`, and the last line of its output is one JSON object. Marks are times
on the machine's monotonic clock, which the parent process shares, at the end of each phase:

    interpreter   Python runs
    import        jaxserve and JAX are imported
    resolve       JAX has found its devices; sizes, plan and ledger are decided
    load          resolved once more, then weights and KV pages are on the device
    compile       every executable is compiled, or loaded from the cache, and has run once
    first_token   a request has its first token
"""

import json
import logging
import resource
import sys
from dataclasses import replace

from jaxserve.core.clock import SystemClock
from jaxserve.core.config import EngineConfig


def main() -> None:
    """Print the marks, the number of executables and the process's peak memory in MB."""
    clock = SystemClock()
    marks = {"interpreter": clock.now()}
    logging.basicConfig(stream=sys.stderr)
    config = EngineConfig(**json.loads(sys.argv[1]))

    from jaxserve.build import build
    from jaxserve.core.sampling import SamplingParams
    from jaxserve.engine.client import TokensPrompt
    from jaxserve.engine.sync_engine import SyncEngine
    from jaxserve.planning.resolve import resolve

    marks["import"] = clock.now()
    resolve(config)  # first, because it configures JAX before anything initialises it
    marks["resolve"] = clock.now()
    built = build(replace(config, warmup=False))
    marks["load"] = clock.now()
    if config.warmup:
        for loop in built.instances:
            loop.executor.warm()
            loop.executor.settle()  # saves what was compiled for the next start
    marks["compile"] = clock.now()
    executables = sum(built.compilations.counts.values())
    engine = SyncEngine(built.loops, built.info, built.tokenizer, built.clock)
    engine.add(TokensPrompt((3, 4, 5)), SamplingParams(max_tokens=1, ignore_eos=True))
    while not engine.idle:
        engine.step()
    marks["first_token"] = clock.now()
    built.close()
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss in bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    figures = {"executables": executables, "peak_rss_mb": peak / 1e6}
    sys.stdout.write(json.dumps({"marks": marks, "figures": figures}) + "\n")


if __name__ == "__main__":
    main()
