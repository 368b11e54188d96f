"""The event loop of a simulated cluster: routing, time in the frontend, and the order of events."""

import pytest

from jaxserve.sim.simulation import Frontend, SimRequest
from tests.sim.clusters import answered, cluster


def test_requests_go_to_the_instance_with_the_fewest_prompt_tokens():
    asked = [SimRequest(0.0, 20, 8), SimRequest(0.1, 5, 8), SimRequest(0.2, 5, 8), SimRequest(0.3, 5, 8)]
    assert [answer.instance for answer in answered(cluster(2), asked)] == ["0", "1", "1", "1"]


def test_instances_do_not_wait_for_each_other():
    alone = answered(cluster(1), [SimRequest(0.0, 16, 16)])[0]
    together = answered(cluster(3), [SimRequest(0.0, 16, 16)] * 3)
    assert {answer.instance for answer in together} == {"0", "1", "2"}
    assert all(answer.token_times == alone.token_times for answer in together)


def test_the_frontend_delays_a_request_by_its_tokens():
    asked = [SimRequest(0.0, 10, 4)]
    (bare,), (delayed,) = (
        answered(cluster(frontend=frontend), asked) for frontend in (None, Frontend(request=0.5, prompt_token=0.01))
    )
    assert delayed.first_token - bare.first_token == pytest.approx(0.6)


def test_the_frontend_delays_a_request_by_the_answers_that_its_instance_streams():
    asked = [SimRequest(0.0, 4, 50), SimRequest(0.0, 4, 50), SimRequest(9.0, 4, 4)]
    bare, delayed = (answered(cluster(2, frontend=frontend), asked) for frontend in (None, Frontend(stream=5.0)))
    assert [answer.instance for answer in delayed] == ["0", "1", "0"]
    assert [answer.first_token for answer in delayed[:2]] == [answer.first_token for answer in bare[:2]]
    assert bare[2].first_token + 4 < delayed[2].first_token < bare[2].first_token + 6  # up to a step


def test_a_later_request_with_a_shorter_prompt_may_arrive_first():
    asked = [SimRequest(0.0, 40, 4), SimRequest(0.1, 4, 4)]
    slow, fast = answered(cluster(seqs=1, frontend=Frontend(prompt_token=0.1)), asked)
    assert fast.first_token < slow.first_token


def test_a_seed_of_events_gives_the_same_result_twice():
    asked = [SimRequest(0.7 * number, 5 + number % 9, 3 + number % 7) for number in range(60)]
    first, second = (answered(cluster(3, pages=20), asked) for _ in range(2))
    assert first == second
    assert [answer.index for answer in first] == list(range(60))
