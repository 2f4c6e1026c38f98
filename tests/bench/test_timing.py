"""Statistics and repetition, on a clock that is made up."""

import pytest
import torch

from dflash2.bench.timing import Timer, Timing


class FakeTimer(Timer):
    """A device on which each run takes 100 us, or what a list says."""

    def __init__(self, **kw):
        super().__init__(torch.device("cpu"), **kw)
        self.asked = []

    def _laps(self, run, samples, repeats):
        self.asked.append((samples, repeats))
        for _ in range(min(3, samples * repeats)):
            run()
        return [100.0 * repeats * (1 + 0.01 * i) for i in range(samples)]


def test_statistics():
    timing = Timing.of(range(101))
    assert (timing.median_us, timing.p20_us, timing.p80_us) == (50, 20, 80)


def test_one_outlier_does_not_move_the_median():
    assert Timing.of([10.0] * 50 + [1e9]).p80_us == 10


def test_short_work_is_repeated_and_the_time_divided():
    timer = FakeTimer(samples=50, sample_us=2000.0, warm_up_us=1000.0)
    timing = timer.measure(lambda: None, units=4)
    assert timer.asked == [(1, 1), (1, 10), (50, 20)]  # a look, a warm-up of 10 runs, 50 samples of 20 runs
    assert timing.median_us == pytest.approx(100 / 4 * 1.245)


def test_long_work_is_not_repeated():
    timer = FakeTimer(samples=50, sample_us=50.0, warm_up_us=50.0)
    timer.measure(lambda: None, samples=20)
    assert timer.asked == [(1, 1), (1, 1), (20, 1)]


def test_several_calls_are_run_in_order():
    ran = []
    run = Timer(torch.device("cpu")).captured([lambda: ran.append("a"), lambda: ran.append("b")])
    run()
    run()
    assert ran == ["a", "b", "a", "b"]


@pytest.mark.gpu
def test_a_captured_graph_does_all_its_calls_and_is_timed_in_order():
    counter, ran = torch.zeros((), device="cuda"), 0
    timer = Timer(torch.device("cuda"), samples=20, sample_us=100.0, warm_up_us=100.0)
    run = timer.captured([lambda: counter.add_(1), lambda: counter.add_(10)])
    before = counter.item()
    run()
    assert counter.item() == before + 11

    def counted():
        nonlocal ran
        ran += 1
        run()

    before = counter.item()
    timing = timer.measure(counted, units=2)
    assert 0 < timing.p20_us <= timing.median_us <= timing.p80_us
    assert counter.item() == before + 11 * ran
