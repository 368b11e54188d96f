"""Estimates of what an instance can serve under a plan, from the costs of steps and the lengths of its requests."""

from dataclasses import dataclass
from math import ceil

from jaxserve.control.costs import CostModel, InstanceCost
from jaxserve.control.plan import InstancePlan
from jaxserve.core.numeric import ceil_div
from jaxserve.core.step_load import StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.telemetry import Snapshot

DEFAULT_ANSWER = 128.0  # tokens, until a sequence has ended


@dataclass(frozen=True)
class Workload:
    """The mean lengths of an instance's sequences, in tokens."""

    prompt: float  # computed prompt tokens, without those of the prefix cache
    answer: float
    context: float  # tokens in the KV pages of a running sequence

    @classmethod
    def between(cls, before: Snapshot, now: Snapshot, page_size: int) -> "Workload":
        """Return the workload between two snapshots of an instance, and of the sequences that wait now.

        Sequences that run are taken to be in the middle of their answers.
        """
        started = sum(now.first_tokens) - sum(before.first_tokens) + now.num_waiting
        prompts = now.prefill_tokens - before.prefill_tokens + now.waiting_tokens
        ended = now.finished - before.finished + now.num_running / 2
        generated = now.generated_tokens - before.generated_tokens
        prompt = max(1.0, prompts / max(1, started))
        answer = max(1.0, generated / ended) if generated and ended > 0.5 else DEFAULT_ANSWER
        held = now.kv_pages_used * page_size / now.num_running if now.num_running else 0.0
        return cls(prompt, answer, held or prompt + answer / 2)


@dataclass(frozen=True)
class Capacity:
    """Estimates of the speed of one instance under one plan.

    Without costs all steps take equally long, so that more sequences at once are all that makes an instance faster.
    The stages of a pipeline each compute a step of another part of the sequences, at the same time.
    """

    plan: InstancePlan
    shapes: Buckets
    page_size: int  # tokens
    cost: InstanceCost | None = None

    @classmethod
    def of(cls, plan: InstancePlan, shapes: Buckets, page_size: int, costs: CostModel | None) -> "Capacity":
        """Return the capacity of an instance under a plan."""
        return cls(plan, shapes, page_size, None if costs is None else costs.of(plan))

    @property
    def slots(self) -> int:
        """The number of sequences that the plan lets run at once."""
        limit = self.plan.max_num_seqs
        return self.shapes.max_num_seqs if limit is None else min(limit, self.shapes.max_num_seqs)

    def sequences(self, workload: Workload) -> int:
        """Return how many sequences fit into the slots and the KV pages."""
        pages_each = max(1.0, workload.context / self.page_size)
        return max(1, min(self.slots, int((self.plan.kv_pages - 1) / pages_each)))

    def tokens_per_s(self, workload: Workload, sequences: int) -> float:
        """Return the generated tokens per second while a number of sequences run, which arrive as others end.

        A share of the steps computes a chunk of a prompt next to the decodes. If even all steps cannot compute the
        prompts of so many sequences, fewer run, on average less than one if a prompt takes several steps.
        """
        ratio = workload.prompt / workload.answer  # prompt tokens for each generated token
        largest, stages = self.shapes.max_tiles * self.shapes.tile, len(self.plan.stages)
        sequences = max(1, min(sequences, int(stages * largest / ratio) or 1))
        part = ceil_div(sequences, stages)  # of one step
        chunk = min(largest, max(ceil(workload.prompt), ceil(ratio * part)))
        share = min(1.0, ratio * part / chunk)
        step = (1 - share) * self.decode_seconds(workload, sequences) + share * self.prefill_seconds(
            workload, sequences, chunk
        )
        return min(sequences, stages * largest / ratio) / step

    def decode_seconds(self, workload: Workload, sequences: int) -> float:
        """Return the time (s) of a step that decodes its part of a number of sequences, in all stages."""
        sequences = ceil_div(sequences, len(self.plan.stages))
        shape = self.shapes.shape(min(sequences, self.shapes.max_num_seqs), 0, 0)
        return self._seconds(StepLoad(shape.tokens, shape.rows, sequences, int(sequences * workload.context), 0))

    def prefill_seconds(self, workload: Workload, sequences: int, chunk: int) -> float:
        """Return the time (s) of a step that also computes `chunk` tokens of prompts, as `decode_seconds`."""
        sequences = ceil_div(sequences, len(self.plan.stages))
        tiles = min(self.shapes.max_tiles, ceil_div(chunk, self.shapes.tile))
        shape = self.shapes.shape(min(sequences, self.shapes.max_num_seqs), tiles, 0)
        length = min(workload.prompt, chunk)
        pairs = chunk * (max(0.0, workload.prompt - length) / 2 + length + 1)
        context = int(sequences * workload.context)
        return self._seconds(StepLoad(shape.tokens, shape.rows, sequences, context, int(pairs)))

    def seconds_to_start(self, workload: Workload, running: int, waiting: int, room: int) -> float:
        """Return the estimated time (s) until the last of the waiting sequences has its first token.

        There is room for `room` sequences at once. Those that find none wait until others end, and until fewer run if
        more than that run now. The prompts of those that find room are computed at once.
        """
        if not waiting:
            return 0.0
        at_once = max(0, min(waiting, room - running))
        blocked = max(waiting, waiting + running - room) - at_once
        largest = self.shapes.max_tiles * self.shapes.tile
        prompts = at_once * workload.prompt
        chunk = max(1, min(largest, ceil(prompts)))
        step = self.prefill_seconds(workload, max(1, running), chunk) if at_once else 0.0
        steps = prompts / chunk
        seconds = step * max(min(1.0, steps), steps / len(self.plan.stages))  # the last prompt goes through all stages
        return seconds + blocked * workload.answer / self.tokens_per_s(workload, room)

    def _seconds(self, load: StepLoad) -> float:
        return 1.0 if self.cost is None else self.cost.seconds(load)
