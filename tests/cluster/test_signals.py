import os
import signal
import time
from unittest.mock import Mock

import pytest

from esmeray.cluster import signals
from esmeray.cluster.signals import StopSignals
from esmeray.common.command_line import CLUSTER_SIGNALS


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(0.01)  # the handler runs in this thread at its next step


@pytest.mark.parametrize("signum", [signal.SIGINT, *CLUSTER_SIGNALS])
def test_before_training_a_signal_raises_and_is_answered_at_once(signum, capfd):
    stop = StopSignals()
    with pytest.raises(KeyboardInterrupt), stop:
        send(signum)
    assert capfd.readouterr().err == "\nstopping\n"
    assert stop.interrupted_code == 128 + signum, "Ray's waits make a plain interrupt of it"


def test_same_request_does_not_break_off_the_cleaning_up_after_itself():
    cleaned = []
    with pytest.raises(KeyboardInterrupt), StopSignals():
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)  # as 'timeout' sends it: to the process and to its group
            cleaned.append(True)
    assert cleaned


def test_the_first_signal_in_training_starts_the_grace_period(monkeypatch, capfd):
    asked = []
    with StopSignals() as stop:
        stop.hand_over(lambda: asked.append(True), "stopping and saving a checkpoint")
        send(signal.SIGTERM)
        assert capfd.readouterr().err == "\nstopping and saving a checkpoint\n"
        send(signal.SIGTERM)  # as 'timeout' sends it: to the process and to its group
        assert (len(asked), stop.exit_code, stop.expired) == (1, 143, False)
        assert 20 < stop.remaining_s(99.0) <= 26
        monkeypatch.setattr(signals, "REPEAT_S", 0.0)
        send(signal.SIGTERM)
        assert stop.expired


def test_repeated_signals_leave_the_grace_period_as_it_is(monkeypatch):
    monkeypatch.setattr(signals, "REPEAT_S", 0.0)
    monkeypatch.setattr(os, "write", Mock(side_effect=BrokenPipeError))  # the reader of the reply is gone
    with StopSignals() as stop:
        stop.hand_over(lambda: None, "stopping")
        for signum in (signal.SIGXCPU, signal.SIGXCPU, signal.SIGTERM):
            send(signum)
        assert (stop.expired, stop.exit_code) == (False, 128 + signal.SIGXCPU)


def test_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            send(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert stop.exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_later_signals_break_off_a_wait_that_asked_for_it(monkeypatch):
    monkeypatch.setattr(signals, "REPEAT_S", 0.0)
    with StopSignals() as stop:
        stop.hand_over(lambda: None, "ending", interrupts=True)
        send(signal.SIGTERM)
        for signum in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(KeyboardInterrupt):
                send(signum)
            assert stop.expired and stop.interrupted_code == 128 + signum
