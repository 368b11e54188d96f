"""The start of a peer's process is timed until its first answer."""

import sys

from bench.peers.startup import first_answer


def test_the_first_answer_ends_the_start() -> None:
    answer, seconds = first_answer([sys.executable, "-c", "print('{\"first_tokens\": [3]}', flush=True); input()"])
    assert answer == {"first_tokens": [3]}
    assert seconds > 0


def test_a_peer_that_dies_is_left_out() -> None:
    answer, _ = first_answer([sys.executable, "-c", "raise SystemExit(1)"])
    assert "skipped" in answer
