"""Where the loops of several instances should run: a thread for each, or one thread for all.

    python -m bench.host_loops [--instances 1,2,4,8] [--milliseconds 2,5,10,20] [--seconds S] [--jax]

Each instance has the real engine core, scheduler, step loop and packing of steps, and decodes 32 sequences whose text
is streamed to tasks of an asyncio loop. Its device is a timer: a step takes a given time and begins when the step
before it has ended, so that only the host can make it wait. With `--jax` each step also transfers its inputs to a
virtual device of its instance, and runs a program there. Three drivers are compared:

- threads: a thread for each instance, which steps it and waits for its device
- ready: one thread, which steps the instances whose oldest step has ended, and waits only if there are none
- in turn: one thread, which steps all instances one after the other

A driver's result is the number of steps per second of all instances, as a share of what the devices could do. `host`
is the processor time of a step.
"""

import argparse
import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.clock import SystemClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_shapes import Buckets, powers_of_two
from jaxserve.core.work import StepOutput, Work
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.model_tokenizer import load_tokenizer
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.executor.batch import pack
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.telemetry import EngineMetrics, Snapshot

SEQUENCES, PAGE, TILE = 32, 16, 32
LONGEST = 16_384  # tokens of a sequence, more than any run computes
ENOUGH = 0.95  # share of the devices' steps from which on the host does not limit them

Program = Callable[[np.ndarray], object]
Deliver = Callable[[list[RequestOutput]], None]


@dataclass
class TimedStep:
    """A step that ends at a given time."""

    end: float
    rows: int
    computed: object  # what the program returned, None without one

    def sample(self) -> None:
        """Do nothing: no sequence follows a grammar."""

    def fetch(self) -> StepOutput:
        """Wait for the end of the step."""
        if self.computed is not None:
            np.asarray(self.computed)
        if (left := self.end - time.monotonic()) > 0:
            time.sleep(left)
        return StepOutput(np.full(self.rows, 7, np.int32))


@dataclass
class TimedDevice:
    """An executor that packs steps for a device that takes `seconds` for each."""

    seconds: float
    buckets: Buckets
    table: PageTable
    program: Program | None = None
    free_at: float = 0.0
    oldest: list[TimedStep] = field(default_factory=list)  # the steps that are dispatched and not fetched

    def execute(self, work: Work) -> TimedStep:
        """Dispatch a step."""
        packed = pack(work, self.buckets.of(work), self.table.rows, PAGE)
        computed = None if self.program is None else self.program(packed)
        self.free_at = max(self.free_at, time.monotonic()) + self.seconds
        step = TimedStep(self.free_at, len(work.decodes) + len(work.chunks), computed)
        self.oldest = [*self.oldest[-1:], step]
        return step


def program_on(device: object) -> Program:
    """Return a small program that runs on a virtual device."""
    import jax

    computed = jax.jit(lambda packed: packed[:SEQUENCES] * 2 + 1)
    return lambda packed: computed(jax.device_put(packed, device))


def loop_of(number: int, seconds: float, tokenizer: Tokenizer, program: Program | None) -> StepLoop:
    """Return the loop of an instance."""
    width = LONGEST // PAGE
    info = ModelInfo("timed", LONGEST, tokenizer.vocab_size, 8, 0)
    table, pages = PageTable(SEQUENCES, width), SEQUENCES * width + 1
    scheduler = Scheduler(SchedulerLimits(SEQUENCES, 4, TILE, PAGE), PagePool(pages, min_pages=width + 1), table)
    core = EngineCore(
        scheduler, info, tokenizer, EngineMetrics("timed"), plan_fields=Snapshot(kv_pages_total=pages - 1)
    )
    buckets = Buckets(SEQUENCES, 4, TILE, 1, powers_of_two(16, width))
    loop = StepLoop(core, TimedDevice(seconds, buckets, table, program), SystemClock())
    params = SamplingParams(max_tokens=LONGEST - 64, ignore_eos=True)
    for row in range(SEQUENCES):
        prompt = tuple(range(5, 37))
        loop.add(Request(f"{number}-{row}", prompt, params, arrival=time.monotonic()))
    return loop


# -- the drivers: each steps the loops until `stop` is set


def in_threads(loops: Sequence[StepLoop], deliver: Deliver, stop: threading.Event) -> None:
    """Step each loop in a thread of its own."""

    def drive(loop: StepLoop) -> None:
        while not stop.is_set():
            deliver(loop.step())

    threads = [threading.Thread(target=drive, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def when_ready(loops: Sequence[StepLoop], deliver: Deliver, stop: threading.Event) -> None:
    """Step the loops whose oldest step has ended; if there are none, wait for the step that was dispatched first."""

    def end(loop: StepLoop) -> float:
        assert isinstance(loop.executor, TimedDevice)
        return loop.executor.oldest[-1].end if loop.executor.oldest else 0.0

    while not stop.is_set():
        now = time.monotonic()
        ready = [loop for loop in loops if end(loop) <= now] or [min(loops, key=end)]
        for loop in ready:
            deliver(loop.step())


def in_turn(loops: Sequence[StepLoop], deliver: Deliver, stop: threading.Event) -> None:
    """Step all loops one after the other."""
    while not stop.is_set():
        for loop in loops:
            deliver(loop.step())


DRIVERS = {"threads": in_threads, "ready": when_ready, "in turn": in_turn}


# -- measurement


@contextlib.contextmanager
def consumers(requests: Sequence[str]) -> Iterator[Deliver]:
    """Yield a function that delivers outputs to a task for each request, in an asyncio loop."""
    loop, queues = asyncio.new_event_loop(), {request: asyncio.Queue[RequestOutput | None]() for request in requests}

    async def consume(queue: asyncio.Queue[RequestOutput | None]) -> int:
        characters = 0
        while (output := await queue.get()) is not None:
            characters += len(output.outputs[0].text)
        return characters

    async def consume_all() -> None:
        await asyncio.gather(*map(consume, queues.values()))

    def put_all(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            queues[output.request_id].put_nowait(output)

    def end() -> None:
        for queue in queues.values():
            queue.put_nowait(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(consume_all(),))
    thread.start()
    yield lambda outputs: loop.call_soon_threadsafe(partial(put_all, outputs)) and None
    loop.call_soon_threadsafe(end)
    thread.join()
    loop.close()


@dataclass(frozen=True)
class Measured:
    """The result of a run."""

    share: float  # of the steps that the devices could do
    steps: float  # per second, of all instances
    host: float  # s of processor time for each step


def measured(driver: str, instances: int, step: float, seconds: float, tokenizer: Tokenizer, *, jax: bool) -> Measured:
    """Run a number of instances whose steps take `step` seconds."""
    programs: list[Program | None] = [None] * instances
    if jax:
        import jax as jax_module

        programs = [program_on(device) for device in jax_module.devices()[:instances]]
    loops = [loop_of(number, step, tokenizer, program) for number, program in enumerate(programs)]
    for loop in loops:
        for _ in range(20):  # the prompts, and what the first steps compile
            loop.step()
    stop, names = threading.Event(), [f"{number}-{row}" for number in range(instances) for row in range(SEQUENCES)]
    with consumers(names) as deliver:
        before = sum(loop.core.snapshot.steps for loop in loops)
        thread = threading.Thread(target=DRIVERS[driver], args=(loops, deliver, stop))
        started, used = time.monotonic(), time.process_time()
        thread.start()
        time.sleep(seconds)
        steps = sum(loop.core.snapshot.steps for loop in loops) - before
        passed, used = time.monotonic() - started, time.process_time() - used
        stop.set()
        thread.join()
    return Measured(steps / passed * step / instances, steps / passed, used / steps)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="1,2,4,8")
    parser.add_argument("--milliseconds", default="2,5,10,20")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--jax", action="store_true", help="run a program on a virtual device in each step")
    options = parser.parse_args()
    if options.jax:
        import os

        os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"] = "cpu", "--xla_force_host_platform_device_count=8"
    path = bundled_model_path()
    tokenizer = load_tokenizer(EngineConfig(model=path), path, 2**17)
    assert tokenizer is not None
    times = [float(each) for each in options.milliseconds.split(",")]
    print("| instances | driver |" + "".join(f" {each:g} ms |" for each in times) + " host | no limit from |")
    print("|---:|---|" + "---:|" * (len(times) + 2))
    for instances in map(int, options.instances.split(",")):
        for driver in DRIVERS:
            found = [
                measured(driver, instances, each / 1e3, options.seconds, tokenizer, jax=options.jax) for each in times
            ]
            shares = "".join(f" {each.share:.1%} |" for each in found)
            enough = next((f"{t:g} ms" for t, each in zip(times, found, strict=True) if each.share >= ENOUGH), "-")
            host = np.median([each.host for each in found]) * 1e6
            print(f"| {instances} | {driver} |{shares} {host:.0f} us | {enough} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
