"""The choice of widths, on machines and texts made up: no clock, no model."""

from __future__ import annotations

import math
import random

import pytest

from dflash2.width import STAKE_ROUNDS, STAKE_SHARE, Acceptance, AutoWidth, RoundCosts

K = 7
#: Seconds of rounds with 0 .. 7 drafts. The third multiplies two and three rows slower than eight, as MKL does on AMD.
MACHINES = {
    "small CPU": [0.060, 0.080, 0.090, 0.100, 0.110, 0.120, 0.130, 0.140],
    "GPU": [0.0200, 0.0220, 0.0221, 0.0222, 0.0223, 0.0224, 0.0225, 0.0226],
    "uneven": [0.060, 0.131, 0.149, 0.118, 0.124, 0.130, 0.136, 0.135],
    "overloaded": [0.060, 0.120, 0.180, 0.240, 0.300, 0.360, 0.420, 0.480],
}


def learned(cost: list[float], widths=range(K + 1), requests: int = 1) -> RoundCosts:
    costs = RoundCosts()
    for k in widths:
        for _ in range(2):
            costs.observe(requests, k, cost[k])
    return costs


def expected_tokens(rates: list[float], k: int) -> float:
    """1 + the sum over i <= k of the probability that drafts 1 .. i all stand."""
    return 1 + sum(math.prod(rates[:i]) for i in range(1, k + 1))


def decode(
    width: AutoWidth, cost: list[float], rates, tokens: int, rng: random.Random, requests: int = 1, slower=lambda: 1.0
):
    """Rounds until ``tokens`` per request: (widths, seconds, tokens). ``rates(n)``: acceptance after n tokens.

    ``slower()`` is what the clock makes of a round's cost; ``seconds`` is without it.
    """
    acceptances, widths, seconds, made = [Acceptance() for _ in range(requests)], [], 0.0, 0.0
    while made < tokens:
        k = width.choose(acceptances, K)
        accepted = []
        for _ in acceptances:
            stood = 0
            while stood < k and rng.random() < rates(made)[stood]:
                stood += 1
            accepted.append(stood)
        width.observe(acceptances, k, accepted, cost[k] * slower())
        widths.append(k)
        seconds += cost[k]
        made += 1 + sum(accepted) / requests
    return widths, seconds, made


def busy(rng: random.Random):
    """The clock of a machine that others use too: 7 % of noise, and one round in fifty takes 1.5 to 3 times as long."""
    return lambda: rng.lognormvariate(0, 0.07) * (rng.uniform(1.5, 3) if rng.random() < 0.02 else 1)


# -- costs ----------------------------------------------------------------------------------------------------------


def test_a_cost_takes_two_measurements():
    """The first may have compiled something: the lower one counts."""
    costs = RoundCosts()
    costs.observe(1, K, 30.0)
    assert costs.to_measure(1, K) == K
    costs.observe(1, K, 0.2)
    costs.observe(1, 0, 0.1)
    assert costs.to_measure(1, K) == 0
    costs.observe(1, 0, 0.3)
    assert costs.to_measure(1, K) == K // 2
    for _ in range(2):
        costs.observe(1, K // 2, 0.15)
    assert costs.to_measure(1, K) is None
    assert costs.seconds(1, K) == 0.2
    assert costs.seconds(1, 0) == 0.1


def test_widths_between_lie_on_the_line():
    costs = learned(MACHINES["uneven"], (0, 3, 7))
    for k, c in [(0, 0.060), (1, 0.060 + 0.058 / 3), (2, 0.060 + 0.058 * 2 / 3), (3, 0.118), (5, 0.1265), (7, 0.135)]:
        assert costs.seconds(1, k) == pytest.approx(c)


def test_narrow_rounds_are_enough_for_narrow_choices():
    """A budget of four tokens never lets a round of seven run; beyond what was measured costs stay level."""
    costs = learned(MACHINES["small CPU"], (0, 1, 3))
    assert costs.to_measure(1, 3) is None
    assert costs.to_measure(1, 4) == 4
    assert costs.to_measure(1, 0) is None
    assert costs.seconds(1, 5) == costs.seconds(1, 3)


def test_batches_have_costs_of_their_own():
    costs = learned(MACHINES["GPU"], (0, 3, 7), requests=4)
    assert [costs.to_measure(n, K) for n in (1, 2, 3, 4, 5, 7, 8)] == [K, K, K, None, None, None, K]


def test_a_hiccup_moves_a_cost_little_and_a_change_moves_it_home():
    costs = learned(MACHINES["small CPU"], (0, 7))
    costs.observe(1, 7, 100.0)
    assert costs.seconds(1, 7) < 1.2 * 0.140
    for _ in range(40):
        costs.observe(1, 7, 0.280)
    assert costs.seconds(1, 7) == pytest.approx(0.280, rel=0.01)


def test_what_slows_one_width_slows_the_others_half():
    """In the logarithm. Else plain decoding would look cheap after a quiet hour, and drafting dear after a busy one."""
    costs = learned(MACHINES["small CPU"], (0, 7))
    for _ in range(60):
        costs.observe(1, 7, 4 * 0.140)
    assert costs.seconds(1, 0) == pytest.approx(2 * 0.060, rel=0.01)


# -- acceptance -----------------------------------------------------------------------------------------------------


def test_a_new_request_is_trusted():
    tokens = Acceptance().tokens(3)
    assert tokens == pytest.approx([1, 1.7, 1.7 + 0.49, 1.7 + 0.49 + 0.343])


@pytest.mark.parametrize("rates", [[0.9] * K, [0.3] * K, [0.95, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1]], ids=str)
def test_it_learns_the_rates(rates):
    """On average, up to what the prior adds to low rates and what positions lend each other."""
    rng, acceptance, seen = random.Random(0), Acceptance(), []
    for _ in range(1000):
        stood = 0
        while stood < K and rng.random() < rates[stood]:
            stood += 1
        acceptance.observe(K, stood)
        seen.append(acceptance.tokens(K))
        assert seen[-1] == sorted(seen[-1])
    for k in (1, 3, K):
        mean = sum(tokens[k] for tokens in seen[100:]) / len(seen[100:])
        assert mean == pytest.approx(expected_tokens(rates, k), rel=0.12)


def test_idle_rounds_let_bad_ones_fade():
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.observe(K, 0)
    low = acceptance.tokens(K)[K]
    assert low < 1.5
    for _ in range(300):
        acceptance.observe(0, 0)
    assert acceptance.tokens(K)[K] == pytest.approx(Acceptance().tokens(K)[K], rel=0.02)


# -- widths ---------------------------------------------------------------------------------------------------------


def test_the_first_rounds_measure_the_widest_none_and_half():
    widths, _, _ = decode(AutoWidth(RoundCosts()), MACHINES["small CPU"], lambda n: [1.0] * K, 40, random.Random(0))
    assert widths == [7, 7, 0, 0, 3, 3, 7, 7]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("requests", [1, 5])
def test_close_to_the_best_fixed_width(machine, rate, requests):
    """Over a long text of one kind: at least 93 % of the best width's speed, found by trying all of them on paper."""
    cost = MACHINES[machine]
    best = max(expected_tokens([rate] * K, k) / cost[k] for k in range(K + 1))
    widths, seconds, made = decode(
        AutoWidth(RoundCosts()), cost, lambda n: [rate] * K, 3000, random.Random(1), requests
    )
    assert made / seconds > 0.93 * best, {k: widths.count(k) for k in range(K + 1)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", [20, 128, 1000])
def test_a_bad_drafter_costs_a_known_stake(machine, tokens):
    cost = MACHINES[machine]
    for seed in range(20):
        width = AutoWidth(learned(cost))
        rates = [0.02 * seed] * K
        _, seconds, made = decode(width, cost, lambda n, r=rates: r, tokens, random.Random(seed))
        assert seconds <= cost[0] * made + STAKE_ROUNDS * cost[0] + STAKE_SHARE * seconds + 1e-9


@pytest.mark.parametrize(("machine", "least"), [("small CPU", 30), ("GPU", 30), ("uneven", 25)])
def test_a_good_text_survives_a_bad_start(machine, least):
    """The first two rounds with drafts fail on a noisy clock, then drafts stand with 0.9: most are soon back.

    Not all: in one of ten the third try fails too, and on the dearest machine two failures of the widest leave too
    little for a third.
    """
    cost, back = MACHINES[machine], 0
    for seed in range(40):
        text, clock = random.Random(seed), busy(random.Random(100 + seed))
        width, acceptances, failed = AutoWidth(learned(cost, (0, 3, K))), [Acceptance()], 0
        for _ in range(40):
            k = width.choose(acceptances, K)
            stood = 0
            while failed >= 2 and stood < k and text.random() < 0.9:
                stood += 1
            failed += k > 0
            width.observe(acceptances, k, [stood], cost[k] * clock())
            if stood:
                back += 1
                break
    assert back >= least


@pytest.mark.parametrize("machine", ["small CPU", "GPU", "uneven"])
@pytest.mark.parametrize("slow", [1, 2])
@pytest.mark.parametrize("after", [0, 1, 2, 10])
def test_a_good_text_survives_slow_rounds(machine, slow, after):
    """One or two rounds with drafts take thrice as long."""
    cost = MACHINES[machine]
    width, acceptances, widths, drafted = AutoWidth(learned(cost, (0, 3, K))), [Acceptance()], [], 0
    for _ in range(40):
        k = width.choose(acceptances, K)
        hiccup = k > 0 and after <= drafted < after + slow
        width.observe(acceptances, k, [min(k, 3)], cost[k] * (3 if hiccup else 1))
        drafted += k > 0
        widths.append(k)
    assert widths.count(0) == 0, widths


@pytest.mark.parametrize("machine", MACHINES)
def test_no_drafts_stand_on_a_noisy_clock(machine):
    """Costs wrongly measured let more than the stake be lost: 0.5 % of 128 tokens on average, 1.5 % in one of ten."""
    cost, lost = MACHINES[machine], []
    for seed in range(40):
        width, clock = AutoWidth(learned(cost, (0, 3, K))), busy(random.Random(100 + seed))
        _, seconds, made = decode(width, cost, lambda n: [0.0] * K, 128, random.Random(seed), 1, clock)
        lost.append(seconds / (cost[0] * made) - 1)
    stake = STAKE_ROUNDS / 128 + STAKE_SHARE
    assert sum(lost) / len(lost) < stake + 0.005
    assert sorted(lost)[35] < stake + 0.015


@pytest.mark.parametrize("machine", ["small CPU", "GPU", "uneven"])
def test_good_texts_keep_their_gain_on_a_noisy_clock(machine):
    """Drafts that stand with 0.85: of 60 seeds the ninth tenth has 80 % of what the best width has on paper."""
    cost = MACHINES[machine]
    best = cost[0] * max(expected_tokens([0.85] * K, k) / cost[k] for k in range(K + 1))
    gains = []
    for seed in range(60):
        width = AutoWidth(learned(cost, (0, 3, K)))
        clock = busy(random.Random(100 + seed))
        _, seconds, made = decode(width, cost, lambda n: [0.85] * K, 256, random.Random(seed), 1, clock)
        gains.append(cost[0] * made / seconds)
    assert sorted(gains)[6] > 0.8 * best, sorted(gains)[:8]


def test_a_stake_is_the_batchs():
    cost = MACHINES["small CPU"]
    _, seconds, made = decode(AutoWidth(learned(cost, requests=6)), cost, lambda n: [0.1] * K, 200, random.Random(0), 6)
    assert seconds <= cost[0] * made + STAKE_ROUNDS * cost[0] + STAKE_SHARE * seconds + 1e-9


def test_drafting_begins_again_when_it_pays():
    """300 tokens in which nothing stands, then everything does."""
    cost = MACHINES["small CPU"]
    widths, _, _ = decode(
        AutoWidth(learned(cost)), cost, lambda n: [0.0 if n < 300 else 1.0] * K, 900, random.Random(0)
    )
    idle = len(widths) - 1 - widths[::-1].index(0)
    assert sum(k > 0 for k in widths[:300]) < 20
    assert idle < 500, "it never came back"
    assert min(widths[-40:]) >= 5


def test_widths_that_are_dear_are_tried_and_left():
    """On the line they look cheap; two rounds each show what they are."""
    widths, _, _ = decode(AutoWidth(RoundCosts()), MACHINES["uneven"], lambda n: [0.75] * K, 4000, random.Random(2))
    assert widths.count(1) <= 2
    assert widths.count(2) <= 2


def test_a_width_measured_on_a_bad_day_is_tried_again():
    """3 drafts are best by 8 %, and were measured 15 % too dear: never seen again, they would stay so."""
    cost = [0.057, 0.121, 0.133, 0.103, 0.119, 0.121, 0.136, 0.127]
    costs = learned([*cost[:3], 1.15 * cost[3], *cost[4:]])
    widths, _, _ = decode(AutoWidth(costs), cost, lambda n: [0.6] * K, 2000, random.Random(0))
    assert widths.count(3) > max(widths.count(k) for k in range(4, K + 1))
    assert costs.seconds(1, 3) == pytest.approx(cost[3], rel=0.03)


def test_a_slow_first_round_is_not_held_against_the_drafter():
    """It compiled kernels for minutes."""
    cost, width, acceptances = MACHINES["GPU"], AutoWidth(RoundCosts()), [Acceptance()]
    seen = set()
    for _ in range(30):
        k = width.choose(acceptances, K)
        width.observe(acceptances, k, [k], cost[k] if k in seen else 120.0)
        seen.add(k)
    assert width.choose(acceptances, K) == K


def test_the_budget_bounds_the_width():
    width = AutoWidth(learned(MACHINES["GPU"]))
    for most in range(K + 1):
        assert width.choose([Acceptance()], most) == most


def test_costs_are_shared_between_calls():
    costs = RoundCosts()
    decode(AutoWidth(costs), MACHINES["overloaded"], lambda n: [0.5] * K, 100, random.Random(0))
    widths, _, _ = decode(AutoWidth(costs), MACHINES["overloaded"], lambda n: [0.5] * K, 20, random.Random(0))
    assert widths == [0] * 20, "a second call knows that drafting cannot pay here"
