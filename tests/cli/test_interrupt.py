"""Ctrl-C, once and more often."""

import signal
import time

import pytest

from bough.cli.interrupt import Interrupt, held


def test_the_first_asks_and_the_second_forces():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as asked:
        assert not asked.requested
        signal.raise_signal(signal.SIGINT)
        assert asked.requested
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_patience_ends():
    with pytest.raises(KeyboardInterrupt), Interrupt(patience_s=0.05):
        signal.raise_signal(signal.SIGINT)
        for _ in range(500):
            time.sleep(0.01)


def test_an_end_in_time_is_no_interrupt():
    with Interrupt(patience_s=0.05) as asked:
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.15)
    assert asked.requested


def test_held_until_the_end_unless_it_comes_twice():
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    with held():
        done.append("undisturbed")
    assert done == ["all of it", "undisturbed"] and signal.getsignal(signal.SIGINT) is before


def test_without_patience_the_first_one_raises_and_other_signals_may_ask():
    with pytest.raises(KeyboardInterrupt), Interrupt(patience_s=0):
        signal.raise_signal(signal.SIGINT)
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt(signal.SIGTERM, patience_s=None) as asked:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert asked.requested and signal.getsignal(signal.SIGTERM) is before
