"""One signal asks, a second one insists, and neither breaks into a running call."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from concurrent.futures import Future

import pytest

from polypath.deployments.interrupts import Interrupts, StopAsked


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait_and_not_the_call_it_falls_into(number: signal.Signals) -> None:
    with Interrupts(on_second=lambda: None) as interrupts:
        send(number)  # here nothing happens
        with pytest.raises(StopAsked):
            interrupts.sleep(10)


def test_waiting_for_a_result_gives_it() -> None:
    future: Future[int] = Future()
    future.set_result(3)
    with Interrupts(on_second=lambda: None) as interrupts:
        assert interrupts.wait_for(future) == 3


def test_waiting_for_a_result_that_does_not_come_can_be_interrupted() -> None:
    with Interrupts(on_second=lambda: None) as interrupts:
        send(signal.SIGINT)
        with pytest.raises(StopAsked):
            interrupts.wait_for(Future())


def test_a_second_signal_is_heard_but_an_echo_of_the_first_is_not() -> None:
    insisted: list[bool] = []
    with Interrupts(on_second=lambda: insisted.append(True)):
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert insisted == []
        time.sleep(0.6)
        send(signal.SIGINT)
        assert insisted == [True]


def test_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(on_second=lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("is_renewed", [False, True])
def test_signals_that_a_library_took_are_taken_back(is_renewed: bool) -> None:
    with (
        open(os.devnull, "w") as nowhere,
        Interrupts(on_second=lambda: None) as interrupts,
    ):
        faulthandler.register(signal.SIGTERM, file=nowhere, chain=False)  # in C, as Ray does
        try:
            if is_renewed:
                interrupts.renew()
            send(signal.SIGTERM)
            if not is_renewed:
                interrupts.sleep(0.05)  # what renewing is for: nobody was told
                return
            with pytest.raises(StopAsked):
                interrupts.sleep(10)
        finally:
            faulthandler.unregister(signal.SIGTERM)
