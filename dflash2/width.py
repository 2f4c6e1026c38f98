"""How many tokens to draft in a round: as many as pay, by what rounds cost and by how many drafts stood lately.

A round with k drafts takes c(k) seconds and yields E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 .. a_k tokens on average, where
a_i is the probability that draft i stands if those before it stood. The width to choose is the k with the most tokens
per second; k = 0 is plain decoding. Costs are measured while rounds run, without extra passes, and need not grow with k
(some libraries multiply by two rows slower than by eight). Nothing here knows models, tensors or engines, and what is
decoded does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Acceptance", "AutoWidth", "RoundCosts"]

#: A cost follows a new measurement by this power of their ratio: a hiccup moves it little, ten rounds take it home.
FOLLOW = 0.2
#: All others follow so far: half of a change is taken for the machine's (its load, its clock, a longer context), so
#: that a width not in use does not keep the cost of better or worse days.
ALL_FOLLOW = FOLLOW / 2
#: One measurement counts as at most so many times dearer or cheaper: a round of thrice its cost moves it by 5 %.
OUTLIER = 1.25
#: Of two widths that cost about the same, the one seen less may have been seen on a bad day: it is taken for cheaper by
#: up to this share, by less the more rounds have been seen, and old rounds fade.
HOPE, COST_MEMORY = 0.15, 0.99

#: What is expected of a request's drafts before the first, and how many drafts weigh as much.
PRIOR, PRIOR_WEIGHT = 0.7, 4.0
#: How many drafts at one position weigh as much as what is known of all positions together.
POSITION_WEIGHT = 8.0
#: What a round counts after one more: the text moves on. Also after one without drafts, so that bad ones are forgotten.
MEMORY = 0.95

#: What drafts may cost beyond what they save: so many plain rounds, and this share of the time since the start. A round
#: whose drafts all fall costs 0.9 plain rounds or less at the best width, even on small CPUs: three of them may, since
#: good answers do begin with two. Drafts that never stand cost 2.5 to 3 % of 128 tokens, 1.6 % of 256.
STAKE_ROUNDS, STAKE_SHARE = 3.0, 0.0025


@dataclass
class _Cost:
    """Of one width: seconds, and how many recent rounds say so."""

    seconds: float
    rounds: float = 1.0


class RoundCosts:
    """Seconds of a round by number of requests and of drafts, learned from the rounds themselves.

    Batch sizes share their numbers from one power of two to the next. Keep one object per pair of models, device, dtype
    and thread setting: the next call then need not learn anew.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], float] = {}
        self._known: dict[int, dict[int, _Cost]] = {}

    def observe(self, requests: int, drafts: int, seconds: float) -> None:
        """Learn from one round. The first of its kind may have compiled or allocated: it takes two to count."""
        bucket = requests.bit_length()
        known = self._known.setdefault(bucket, {})
        for cost in known.values():
            cost.rounds = max(cost.rounds * COST_MEMORY, 1.0)
        if drafts in known:
            ratio = min(max(seconds / known[drafts].seconds, 1 / OUTLIER), OUTLIER)
            for k, cost in known.items():
                cost.seconds *= ratio ** (FOLLOW if k == drafts else ALL_FOLLOW)
            known[drafts].rounds += 1
        elif (bucket, drafts) in self._first:
            known[drafts] = _Cost(min(seconds, self._first.pop((bucket, drafts))))
        else:
            self._first[bucket, drafts] = seconds

    def to_measure(self, requests: int, most: int) -> int | None:
        """The width to take because too little is known to choose: the widest, none, then half the widest.

        The third because costs are no straight line: a few failed tries at guessed costs can spend a request's stake.
        None: enough is known.
        """
        known = self._known.get(requests.bit_length(), {})
        if not any(k >= most for k in known):
            return most
        if 0 not in known:
            return 0
        half = max(known) // 2
        return half if half <= most and half not in known else None

    def measured(self, requests: int, drafts: int) -> bool:
        """Whether c(drafts) was seen, or lies beyond all that was."""
        known = self._known[requests.bit_length()]
        return drafts in known or drafts > max(known)

    def seconds(self, requests: int, drafts: int, hope: float = 0.0) -> float:
        """c(drafts); a width not measured lies on the line between its measured neighbours, 0 being one.

        Args:
            requests: R of the round.
            drafts: k of the round.
            hope: how much cheaper a width may be than its last measurement said; less, the more rounds said so.
        """
        known = self._known[requests.bit_length()]
        below = max(k for k in known if k <= drafts)
        above = min((k for k in known if k >= drafts), default=below)
        low, high = (known[k].seconds * (1 - hope / known[k].rounds ** 0.5) for k in (below, above))
        share = (drafts - below) / (above - below) if above > below else 0.0
        return low + share * (high - low)


@dataclass(eq=False)
class Acceptance:
    """How many drafts of one request stood lately, by their position."""

    _kept: list[float] = field(default_factory=list)
    _tried: list[float] = field(default_factory=list)

    def observe(self, drafts: int, accepted: int) -> None:
        """One round: the first ``accepted`` of its drafts stood. 0 drafts: time passes."""
        more = [0.0] * (drafts - len(self._kept))
        self._kept = [x * MEMORY for x in self._kept] + more
        self._tried = [x * MEMORY for x in self._tried] + more
        for i in range(min(accepted + 1, drafts)):
            self._tried[i] += 1.0
            self._kept[i] += i < accepted

    def tokens(self, most: int) -> list[float]:
        """E(0) .. E(most)."""
        alike = (sum(self._kept) + PRIOR_WEIGHT * PRIOR) / (sum(self._tried) + PRIOR_WEIGHT)
        expected, stands = [1.0], 1.0
        for i in range(most):
            kept, tried = (self._kept[i], self._tried[i]) if i < len(self._kept) else (0.0, 0.0)
            stands *= (kept + POSITION_WEIGHT * alike) / (tried + POSITION_WEIGHT)
            expected.append(expected[-1] + stands)
        return expected


class AutoWidth:
    """Chooses one width after another for a batch of requests.

    Drafting that does not pay ends by itself, and starts again when it may pay: idle rounds let the memory of bad
    rounds fade. What bad luck can cost is bounded: no width is taken whose failure would make the drafts cost, in all,
    more than ``STAKE_ROUNDS`` plain rounds and ``STAKE_SHARE`` of the time beyond what they saved. So that a bad start
    leaves something of it, widths never measured, whose costs are guesses, are tried with won time only.

    Args:
        costs: of the pair's rounds, shared between calls.
    """

    def __init__(self, costs: RoundCosts):
        self.costs = costs
        self._saved_s = self._elapsed_s = 0.0

    def choose(self, requests: Sequence[Acceptance], most: int) -> int:
        """Drafts for the next round of these requests, 0 to ``most``."""
        n = len(requests)
        wanted = self.costs.to_measure(n, most)
        if wanted is not None:
            return wanted
        cost = [self.costs.seconds(n, k) for k in range(most + 1)]
        hoped = [self.costs.seconds(n, k, HOPE) for k in range(most + 1)]
        tokens = [sum(column) / n for column in zip(*(r.tokens(most) for r in requests), strict=True)]
        stake = self._saved_s + STAKE_ROUNDS * cost[0] + STAKE_SHARE * self._elapsed_s
        affordable = [
            k
            for k in range(1, most + 1)
            if cost[k] - cost[0] <= stake and (self.costs.measured(n, k) or cost[k] <= self._saved_s)
        ]
        return max([0, *affordable], key=lambda k: tokens[k] / hoped[k])

    def observe(self, requests: Sequence[Acceptance], drafts: int, accepted: Sequence[int], seconds: float) -> None:
        """What became of a round: for each request the drafts that stood, and the seconds all of it took."""
        n = len(requests)
        self.costs.observe(n, drafts, seconds)
        if self.costs.to_measure(n, drafts) is None:
            plain, cost = self.costs.seconds(n, 0), self.costs.seconds(n, drafts)  # not `seconds`: no luck, no hiccups
            self._saved_s += plain * (1 + sum(accepted) / n) - cost
            self._elapsed_s += cost
        for r, a in zip(requests, accepted, strict=True):
            r.observe(drafts, a)
