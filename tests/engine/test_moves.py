"""Requests that move between instances which come and go: every answer is the one of an instance that stays."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.errors import ContextLengthExceeded
from jaxserve.core.request import FinishReason, Request, RequestOutput, SequenceStatus
from jaxserve.core.sampling import SamplingParams
from jaxserve.telemetry import Snapshot, combine
from tests.support.paged_device import VOCAB, Burst
from tests.support.service import CAPACITY, LONGEST, Service


def requests_of(rng: random.Random, count: int) -> list[Request]:
    """Return requests of every kind."""
    shared = [rng.randrange(VOCAB) for _ in range(24)]
    made = []
    for number in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        kind = rng.choice(["plain", "plain", "text", "grammar", "embed", "prompt logprobs", "prompt alone", "early"])
        params = SamplingParams(
            n=1 if kind == "embed" else rng.choice([1, 1, 2, 3]),
            max_tokens={"embed": 1, "prompt alone": 0}.get(kind, rng.choice([1, 5, 20, 40, 70])),
            ignore_eos=kind != "early",
            stop=["ab", "q"] if kind == "text" else None,
            detokenize=kind == "text",
            min_tokens=0 if kind == "prompt alone" else rng.choice([0, 1]),
            prompt_logprobs=1 if kind.startswith("prompt") else None,
        )
        request = Request(
            f"r{number}",
            tuple(shared[: rng.choice([0, 0, 8, 24])] + own),
            params,
            float(number),
            priority=rng.choice([0, 0, 1]),
            salt=rng.choice(["", "tenant"]),
            embed=kind == "embed",
            stream=rng.random() < 0.7,
        )
        made.append(replace(request, grammar=Burst()) if kind == "grammar" else request)
    return made


def result_of(output: RequestOutput) -> tuple:
    outputs = [(o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]
    return outputs, output.finished, output.prompt_logprobs, None if output.embedding is None else output.embedding[0]


def unmoved(requests: list[Request]) -> dict[str, tuple]:
    """Return the results of requests in one large instance that stays."""
    service = Service(1, pages=1000, slots=100, capacity=LONGEST)
    for request in requests:
        service.add(request, 0)
    service.finish()
    return {request_id: result_of(output) for request_id, output in service.answers.items()}


CHANGES = ("step",) * 30 + ("join", "part") * 2 + ("move", "reattach", "resize", "abort", "leave room")


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 10), st.integers(40, 150))
def test_answers_do_not_depend_on_moves(seed: int, count: int, actions: int) -> None:
    rng = random.Random(seed)
    requests, service, aborted = requests_of(rng, count), Service(), set()
    service.instances[-1].core.salt = "int8"
    waiting = list(requests)
    for _ in range(actions):
        if waiting and rng.random() < 0.3:
            service.add(waiting.pop(0), rng.randrange(8))
        change, which, number = rng.choice(CHANGES), rng.randrange(8), rng.randrange(8)
        if change == "step":
            service.step(which)
        elif change == "move":
            service.move(which, rng.randrange(8), number)
        elif change == "reattach":
            service.reattach(which)
        elif change == "leave room":
            service.leave_room(which)
        elif change == "abort" and rng.random() < 0.3:
            service.abort(f"r{number}")
            aborted.add(f"r{number}")
        elif change in ("join", "part", "resize"):
            getattr(service, change)(which, number)
        service.check()
    for request in waiting:
        service.add(request, rng.randrange(8))
    service.finish()
    wanted = unmoved(requests)
    for request in requests:
        if request.id not in aborted:
            assert result_of(service.answers[request.id]) == wanted[request.id]


# -- one claim each


def request(name: str, prompt: int = 10, answer: int = 12, *, at: float = 0.0, **fields) -> Request:
    """Return a request whose prompt depends on its length alone."""
    own = {field: fields.pop(field) for field in ("priority", "salt", "stream", "embed", "grammar") if field in fields}
    params = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False, **fields)
    return Request(name, tuple(token % VOCAB for token in range(prompt)), params, at, **own)


def only_sequence(service: Service, which: int = 0):
    (sequences,) = service.instances[which].core.unfinished.values()
    return sequences[0]


def test_joined_instances_compute_nothing_again() -> None:
    service = Service(2)
    for i in range(2):
        service.add(request(f"r{i}", 20 + i), i)
    for turn in range(12):
        service.step(turn)
    service.join()
    service.finish()
    assert combine([core.snapshot for core in service.cores]).prefill_tokens == 20 + 21


def test_parted_instance_computes_nothing_again() -> None:
    service = Service(2)
    service.join()
    for i in range(4):
        service.add(request(f"r{i}", 20 + i, 8))
    for _ in range(8):
        service.step()
    computed = service.instances[0].core.snapshot.prefill_tokens
    service.part()
    assert [len(instance.core.request_ids) for instance in service.instances] == [2, 2]
    service.finish()
    assert combine([core.snapshot for core in service.cores]).prefill_tokens == computed


def test_request_computed_again_elsewhere_is_not_a_preemption() -> None:
    service = Service(2)
    service.add(request("r", 20), 0)
    for _ in range(6):
        service.step(0)
    service.move(0, 1, 1)
    assert only_sequence(service, 1).queued_at == service.clock.time
    service.finish()
    first, second = (core.snapshot for core in service.cores)
    assert (first.preemptions, second.preemptions) == (0, 0)
    assert first.prefill_tokens == 20 < second.prefill_tokens
    assert service.instances[1].core.scheduler.prefix_queries == 0, "the prompt is looked up once"


def test_totals_of_an_instance_stay_when_it_ends() -> None:
    service = Service(2)
    for i in range(4):
        service.add(request(f"r{i}"), i)
    seen = Snapshot()
    for turn in range(40):
        service.step(turn)
        if turn in (8, 20):
            (service.join if turn == 8 else service.part)()
        before, seen = seen, combine([core.snapshot for core in service.cores])
        assert seen.generated_tokens >= before.generated_tokens
        assert seen.busy_seconds >= before.busy_seconds
    service.finish()
    total = combine([core.snapshot for core in service.cores])
    assert (total.generated_tokens, total.finished) == (4 * 12, 4)
    assert (total.num_running, total.num_waiting, total.kv_pages_used, total.kv_pages_total) == (0, 0, 0, 0)


def test_new_instance_begins_with_totals_of_zero() -> None:
    service = Service(2)
    service.add(request("r"))
    for _ in range(5):
        service.step()
    service.join()
    joined = service.instances[0].core.snapshot
    assert (joined.num_running, joined.generated_tokens, joined.steps) == (1, 0, 0)


def test_waiting_requests_keep_their_order_and_their_age() -> None:
    service = Service(2, slots=1)
    for name, at, priority, which in (("a", 3, 1, 0), ("b", 1, 1, 1), ("c", 2, 0, 1), ("d", 4, 0, 0)):
        service.add(request(name, 5, at=at, priority=priority), which)
    service.join()
    scheduler = service.instances[0].core.scheduler
    assert scheduler.waiting_since == 1
    service.step()
    assert [sequence.request.id for sequence in scheduler.running] == ["c", "d"]
    assert (scheduler.num_waiting, scheduler.waiting_tokens, scheduler.waiting_since) == (2, 10, 1)


def test_running_sequences_without_a_slot_are_computed_again_the_last_by_order_first() -> None:
    service = Service(1, slots=3)
    for name, at, priority in (("late", 2, 0), ("early", 1, 0), ("urgent", 3, -1)):
        service.add(request(name, 5, at=at, priority=priority))
    for _ in range(4):
        service.step()
    (before,) = service.instances
    states = service.drained(before)
    service.slots = 2
    after = service.make(1, before.pool, before.device.pages, salt=before.core.salt)
    after.core.attach(states, lambda page: page, service.clock.now())
    service.replace([before], [after])
    assert [sequence.request.id for sequence in after.core.scheduler.running] == ["urgent", "early"]
    assert (after.core.scheduler.num_waiting, after.core.scheduler.waiting_since) == (1, service.clock.time)
    service.check()
    service.finish()


def test_prefixes_of_joined_instances_of_one_precision_are_found() -> None:
    service = Service(2)
    for i in range(2):
        service.add(request(f"r{i}", 20, 2), i)
    service.finish()
    service.join()
    service.add(request("same", 20, 2))
    service.finish()
    assert service.answers["same"].num_cached_tokens == 16


def test_pages_computed_under_another_precision_are_not_shared() -> None:
    service = Service(2)
    service.instances[1].core.salt = "int8"
    service.add(request("r", 20, 20), 1)
    for _ in range(4):
        service.step(1)
    service.join()
    assert only_sequence(service).private
    for _ in range(12):
        service.step()
    service.add(request("same", 20, 2))
    service.finish()
    assert service.answers["same"].num_cached_tokens == 0


def test_prefix_copied_to_a_side_is_found_there_too() -> None:
    service = Service(2)
    service.join()
    for i in range(2):
        service.add(request(f"r{i}", 20, 20))
        for _ in range(4):
            service.step()
    service.part()
    for i in range(2):
        service.add(request(f"same{i}", 20, 2), i)
    service.finish()
    assert [service.answers[f"same{i}"].num_cached_tokens for i in range(2)] == [16, 16]


def test_abort_after_a_move_frees_everything() -> None:
    service = Service(2)
    for i in range(2):
        service.add(request(f"r{i}", n=2), i)
    for turn in range(6):
        service.step(turn)
    service.join()
    service.abort("r0"), service.abort("r1")
    service.finish()


def test_request_whose_id_is_in_use_is_refused_without_any_change() -> None:
    service = Service(2)
    service.add(request("r"), 0), service.add(request("r"), 1), service.add(request("other"), 1)
    source, target = (instance.core for instance in service.instances)
    states = source.detach()
    with pytest.raises(ValueError, match="request id 'r' is already in flight"):
        target.attach(states, None, 1.0)
    assert set(target.request_ids) == {"r", "other"}
    source.attach(states, None, 1.0)
    service.check()


def test_request_with_a_token_in_flight_cannot_be_detached() -> None:
    service = Service(1)
    service.add(request("r"))
    service.step()
    with pytest.raises(AssertionError, match="a token in flight"):
        service.instances[0].core.detach()


# -- requests that outgrow their instance


def test_request_that_outgrows_its_instance_goes_on_in_a_larger_one() -> None:
    service = Service(2)
    service.add(request("r", 10, 40))
    while not service.room:
        service.step()
    assert len(service.answers["r"].outputs[0].token_ids) == CAPACITY - 10, "all tokens so far have been delivered"
    assert service.instances[0].loop.idle
    assert service.instances[0].pool.used == 0
    service.finish()
    assert result_of(service.answers["r"]) == unmoved([request("r", 10, 40)])["r"]


def test_answers_of_a_request_that_outgrows_its_instance_leave_together() -> None:
    service = Service(2)
    service.add(request("r", 10, 40, n=3))
    while not service.room:
        service.step()
    (state,) = service.room
    assert [sequence.status for sequence in state.sequences] == [SequenceStatus.WAITING] * 3
    assert service.instances[0].core.request_ids == set()


def test_answer_that_ends_at_the_capacity_does_not_outgrow_it() -> None:
    service = Service(1)
    service.add(request("r", 10, CAPACITY - 10))
    service.finish()
    assert service.answers["r"].outputs[0].finish_reason == FinishReason.LENGTH
    assert service.room == []


@pytest.mark.parametrize(("prompt", "outgrown"), [(CAPACITY - 1, False), (CAPACITY, True), (LONGEST - 1, True)])
def test_prompt_that_leaves_no_room_for_a_token_outgrows_its_instance_at_once(prompt: int, outgrown: bool) -> None:
    service = Service(4)
    service.add(request("r", prompt, 1))
    assert bool(service.instances[0].core.take_outgrown()) == outgrown


def test_only_the_limit_of_the_service_refuses_a_request() -> None:
    service = Service(4)
    service.add(request("fits", 10, LONGEST - 10))
    with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {LONGEST} tokens"):
        service.add(request("long", 10, LONGEST - 9))


def test_outgrown_request_can_be_aborted_before_it_is_taken() -> None:
    service = Service(1)
    core = service.instances[0].core
    service.add(request("r", CAPACITY, 40, n=2))
    assert (core.scheduler.num_waiting, core.scheduler.num_deferred) == (2, 2)
    core.abort("r")
    assert core.take_outgrown() == []
    assert core.idle
    service.add(request("r", 10, 2))
    service.finish()
    assert len(service.answers["r"].outputs[0].token_ids) == 2


def test_running_request_that_moves_to_an_instance_too_small_for_it_gives_its_pages_back() -> None:
    service = Service(2)
    service.join()
    service.add(request("r", CAPACITY - 4, 20, n=2))
    for _ in range(15):
        service.step()
    (before,) = service.instances
    states = service.drained(before)
    after = service.make(1, before.pool, before.device.pages, salt=before.core.salt)
    after.core.attach(states, lambda page: page, service.clock.now())
    assert after.pool.used == 0
    service.room += after.core.take_outgrown()
    assert [state.request.id for state in service.room] == ["r"]


def test_request_is_outgrown_again_after_it_came_back() -> None:
    service = Service(2)
    core = service.instances[0].core
    service.add(request("r", CAPACITY, 4, n=2))
    core.attach(core.detach(), None, 1.0)
    core.attach(core.detach(), None, 1.0)
    assert [state.request.id for state in core.take_outgrown()] == ["r"]
    assert core.take_outgrown() == []


# -- drain


@pytest.mark.parametrize("grammar", [None, Burst()])
def test_drain_returns_the_outputs_of_the_step_in_flight(grammar: Burst | None) -> None:
    service = Service(1)
    loop = service.instances[0].loop
    service.add(request("r", 7, 24, grammar=grammar))
    counts = [sum(len(o.outputs[0].token_ids) for o in loop.step()) for _ in range(2)]
    assert counts == [0, 1]
    (output,) = loop.drain()
    assert len(output.outputs[0].token_ids) == 1
    assert not loop.in_flight
    assert loop.drain() == []
    service.take([output])
    service.finish()


def test_drain_runs_what_waits_for_the_dispatched_steps() -> None:
    service = Service(1)
    loop, ran = service.instances[0].loop, []
    service.add(request("r"))
    loop.step()
    loop.after_dispatched(lambda: ran.append(True))
    assert ran == []
    loop.drain()
    assert ran == [True]
