"""bench.peers.startup: the time until a peer's first answer."""

import sys

from bench.peers.startup import first_answer


def test_start_of_a_peer_ends_with_its_first_answer() -> None:
    answer, seconds = first_answer([sys.executable, "-c", "print('{\"first_tokens\": [3]}', flush=True); input()"])
    assert answer == {"first_tokens": [3]}
    assert seconds > 0


def test_peer_that_dies_is_skipped() -> None:
    answer, _ = first_answer([sys.executable, "-c", "raise SystemExit(1)"])
    assert "skipped" in answer
