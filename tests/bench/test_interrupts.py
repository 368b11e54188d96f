"""Termination signals interrupt a measurement as Ctrl-C does."""

import os
import signal

import pytest

from jaxserve.bench.interrupts import signals_as_ctrl_c


@pytest.fixture(params=["SIGTERM", "SIGHUP"])
def number(request):
    number = getattr(signal, request.param)
    before = signal.getsignal(number)
    yield number
    signal.signal(number, before)


@pytest.mark.parametrize("of_ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_termination_signal_interrupts_even_if_ctrl_c_is_ignored(number, of_ctrl_c):
    signal.signal(number, signal.SIG_DFL)
    before = signal.signal(signal.SIGINT, of_ctrl_c)
    try:
        with signals_as_ctrl_c(), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_ignored_termination_signal_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with signals_as_ctrl_c():
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
