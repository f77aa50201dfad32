"""One decision per pass: which drafters are asked, and how many nodes of which drafts are verified.

Renewal-reward: tokens per time are highest in the long run if every pass takes what its time is worth, where
time is worth the tokens that it brings on average (Dinkelbach 1967). That average is the price of a
microsecond: the rate of plain decoding for all that run or wait, times the speed-up of late. A drafter is
asked if its expected gain exceeds the price of its time, and nodes of all sequences are verified in the order
of their chances while each exceeds the price of its row. So speculation fades out by itself as rows get dear.

A bank of saved time bounds the loss where estimates are wrong (see Bank).

Somebody waits for the first token of a sequence, and not only for the last. So its own draft may delay it by
no more than FIRST_DELAY of the pass that gives it; what does not fit is drafted one pass later. A draft that
begins with what the grammar forces may delay it by FORCED_DELAY or FORCED_DELAY_US: the first token alone
says nothing then, and what follows comes a pass earlier.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from paceline.drafters.support.grammar_filter import FORCED
from paceline.engine.estimates import (
    FIRST,
    MAX_OUTLIER,
    Acceptance,
    CostCurve,
    DraftTime,
    Estimates,
    Gain,
    Prior,
    ReadShare,
    SlowdownFit,
    StartTime,
    TextFactor,
)
from paceline.types import NO_DRAFT, ROOT, Ask, Controller, Draft, DraftPolicy, Round, Seq

ROWS_AHEAD: Final = 4  # over which the price of a row is a mean, before the draft is known
CAUTION: Final = 0.95  # factor on chances: of many estimates the highest are too high
MIN_GAIN: Final = 0.02  # tokens of a sequence below which nothing is worth the trouble
EXPLORED: Final = 0.003  # of the time: for asking a drafter that does not seem to pay
FIRST_EXPLORED: Final = 0.05  # tokens of such time at the beginning of a text
EXPLORED_SAVINGS: Final = 0.1  # of the time that drafts have saved: the same
MAX_EXPLORED: Final = 8.0  # tokens of such time that may be saved up
PROBE_NODES: Final = 2  # asked for then
TIMED_DRAFTS: Final = 4  # until the time of a drafter is known
IDLE_PASSES: Final = 4  # before drafters that do not pay are considered again
MAX_IDLE: Final = 20  # passes until they are considered again, however long they cannot be asked
FEWER_USERS: Final = 0.75  # of those before: prices have fallen, so that all are considered at once
TRIAL_PASSES: Final = 12  # at the beginning of a text in which a head is tried though it does not seem to pay
TRIAL_SHARE: Final = 0.25  # of the price of an ask: the least that one of a trial counts for
READ_PASSES: Final = 4  # before a head that pays is considered again
UNREAD_PASSES: Final = 16  # the same for one that does not: it reads nothing meanwhile
FIRST_READING: Final = 0.02  # of a pass: the time of reading one sequence's, before any evidence
OWN_SHARE: Final = 0.1  # weight of a pass in the running mean of the controller's own time
OWN_FALL: Final = 0.3  # the same where it falls: while it seems long, few are asked, who could correct it
OWN_FURTHER: Final = 0.15  # of that time: for an ask that is not the first of its sequence in a pass
MAX_NODES: Final = 64  # of a draft
SPEED_DECAY: Final = 0.97  # weight of earlier passes in the speed-up
NOTICEABLE: Final = 0.01  # tokens: a lower price of drafting one more node does not limit a draft
SPARE: Final = 0.03  # tokens of time for drafting nodes beyond those that are expected to pay
FIRST_DELAY: Final = 0.02  # of a pass: by as much drafts may delay the first tokens that it gives
FORCED_DELAY: Final = 0.05  # the same where the grammar forces them,
FORCED_DELAY_US: Final = 5000  # or microseconds, which nobody notices
MAX_DEBT: Final = 4.0  # tokens that a sequence may lose before it is decoded plainly for a while
DEBT_OF_MANY: Final = 0.5  # at least this share of it, where several run: all of them may be in debt
SMALL_LOSS: Final = 0.05  # tokens: asking a cheap drafter that does not pay is no reason to stop
DEBT_SHARE: Final = 0.01  # the same for each token so far
COOL_DOWN: Final = (16, 512)  # tokens of that while: the first time, and at most


class Fixed(Controller):
    """Always as far as the request allows.

    It has no estimates: scores of trained heads are believed as they are, not calibrated.
    """

    def plan(self, seqs: Sequence[Seq], rows: int, waiting: int = 0) -> list[int]:
        return [seq.spec.max_draft for seq in seqs]

    def learn(self, rounds: Sequence[Round]) -> None:
        return


@dataclass(slots=True)
class Bank:
    """Time saved by drafts, in tokens of plain decoding, and when to stop drafting.

    In debt, a pass that loses is followed by COOL_DOWN tokens of plain decoding, twice as many each time. A
    pass loses at most n tokens' time. So N tokens take no longer than 1 + DEBT_SHARE + n / 512 times plain
    decoding and MAX_DEBT + 6 n tokens' time, whatever the drafters do.
    """

    saved: float = 0.0
    tokens: int = 0
    plain: int = 0  # tokens still to be decoded without drafts
    cool_down: int = COOL_DOWN[0]

    def add(self, tokens: int, cost: float, max_debt: float = MAX_DEBT) -> None:
        """A pass with `tokens` beyond what plain decoding gives, and its cost in tokens."""
        gain = tokens - cost
        self.saved += gain
        in_debt = self.saved < -max_debt - DEBT_SHARE * self.tokens
        if in_debt and gain < -SMALL_LOSS and not self.plain:
            self.plain = self.cool_down
            self.cool_down = min(2 * self.cool_down, COOL_DOWN[1])
        elif gain > 0 and not in_debt:
            self.cool_down = max(self.cool_down // 2, COOL_DOWN[0])


class _Source:
    """A drafter's acceptance on a text: that on its route, and the text's own factor."""

    __slots__ = ("acceptance", "factor")

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance, self.factor = acceptance, TextFactor()


@dataclass(slots=True)
class _Text:
    """The state of one sequence."""

    route: str
    # Passes until a head is considered again: above 0 it reads all of them, below 0 none.
    reads: dict[str, int] = field(default_factory=dict)
    trials: dict[str, int] = field(default_factory=dict)  # passes left in which a head is asked in any case
    bank: Bank = field(default_factory=Bank)
    sources: dict[str, "_Source"] = field(default_factory=dict)  # of its nodes, by drafter
    gains: dict[str, Gain] = field(default_factory=dict)  # by drafter
    begun: set[str] = field(default_factory=set)  # drafters that were asked before
    asked: bool = False  # in this pass
    opened: bool = False  # whether to ask for what the grammar forces at the beginning was decided
    opened_by: str = ""  # the drafter asked for what is forced at the beginning: its gain is another then
    # Tokens of time that each drafter may be asked for though it does not seem to pay, and was asked for.
    to_explore: float = 0.0
    explored: dict[str, float] = field(default_factory=dict)
    idle: int = 0  # passes until drafters are considered again
    idled: int = 0  # passes, of one token each, since they were considered
    plans: int = 0  # passes in which drafters were considered
    unasked: bool = False  # nobody was asked in the pass before
    begins_forced: bool = False  # the draft of this pass, with what the grammar forces
    wait: float = 0.0  # passes until one of those considered last may be asked
    scored: Draft = NO_DRAFT  # a draft or a part of it, and the chances of its nodes
    chances: list[float] = field(default_factory=list)
    shadow: Draft = NO_DRAFT  # of an earlier pass: its nodes are compared with the tokens as they come
    node: int = ROOT  # of the shadow: the last one that has come true
    after: int = 0  # tokens of the text up to and with that one


class Rate(Controller, DraftPolicy):
    """Maximises tokens per measured time, plain decoding included.

    private: drafters about which each sequence learns by itself (see Drafter.private).
    """

    def __init__(self, prior: Prior | None = None, private: Collection[str] = ()) -> None:
        self.cost, self._private = CostCurve(prior), frozenset(private)
        self.estimates = known = Estimates()
        self._acceptance, self._gains = known.acceptance, known.gains
        self._draft_us, self._start_us, self._read_us = known.draft_us, known.start_us, known.read_us
        self._slowdown, self._slowdown_fit = known.slowdown, SlowdownFit(known.slowdown)
        self._texts: dict[str, _Text] = {}
        self._of_route: Counter[str] = Counter()  # texts that run, by route
        self._explored = 0.0  # tokens of time to begin or read texts with, where that does not seem to pay
        # Tokens of time to explore with that texts have left over, by route and drafter: a short text has too
        # few for one ask, where passes are short.
        self._unspent: dict[tuple[str, str], float] = {}
        self._us_price = self._row_price = 0.0  # tokens that a microsecond and a row of this pass must bring
        self._later_row_price = 0.0  # the same of a row once all prompts are read
        # Microseconds by which a sequence's draft may delay its first token, by which one that the grammar
        # forces may, and those that each node adds.
        self._first_us, self._forced_us, self._first_rows_us = 0.0, 0.0, list[float]()
        self._untimed: set[str] = set()  # whose time is not known before this pass
        self._reads: dict[str, ReadShare] = {}  # by drafter
        self._after_prompt = False  # a prompt was in the last pass
        self._awaited: set[str] = set()  # sequences whose first token is still to be learned from
        self._passes = self._users = 0  # planned so far; sequences in them, of late
        # Of EXPLORED that is a sequence's, since others of the route explore for it too; and of MAX_DEBT.
        self._share = 1.0

    def policy(self, drafters: tuple[str, ...]) -> DraftPolicy:
        return self

    def plan(self, seqs: Sequence[Seq], rows: int, waiting: int = 0) -> list[int]:
        self._untimed.clear()
        if not seqs:
            return []
        budgets, context, first, cost = [], 0, 0, self.cost
        self._passes += 1
        if len(seqs) != self._users:
            self._change_users(len(seqs))
        for seq in seqs:
            budgets.append(self._planned(seq))
            length = len(seq.tokens)
            if length > context:
                context = length
            if length == seq.prompt_len:
                first += 1
                self._awaited.add(seq.id)
        users, rows_us = len(seqs) + waiting, cost(rows, context)
        users_us = rows_us if users == rows else cost(users, context)
        self._us_price = self.estimates.speedup * users / users_us
        self._row_price = self._us_price * (cost(rows + ROWS_AHEAD, context) - rows_us) / ROWS_AHEAD
        self._later_row_price = self._row_price
        if rows != len(seqs):
            later_us = cost(len(seqs) + ROWS_AHEAD, context) - cost(len(seqs), context)
            self._later_row_price = self._us_price * later_us / ROWS_AHEAD
        if first:
            self._first_us = FIRST_DELAY * rows_us / first
            self._forced_us = max(FORCED_DELAY * rows_us, FORCED_DELAY_US) / first
            us = cost.curve(rows, MAX_NODES + 1, context)
            self._first_rows_us = list(accumulate([after - rows_us for after in us[1:]], max))
        return budgets

    def _planned(self, seq: Seq) -> int:
        spec = seq.spec
        if not spec.max_draft or not spec.drafters:
            return 0
        text = self._texts.get(seq.id) or self._text(seq)
        if text.idle and spec.adaptive:
            text.idle -= 1
            text.idled += 1
            text.asked = False
            return 0
        text.plans, text.begins_forced = text.plans + 1, False
        # What a grammar forces is known only once a drafter was asked.
        text.unasked, text.asked = text.idled > 0 or (seq.cursor is None and not text.asked), False
        if text.idled:
            self._learn_idle(text)
        # What a grammar leaves open and what it forces come by turns.
        by_turns = seq.cursor is not None and not text.bank.plain
        text.scored, text.wait = NO_DRAFT, IDLE_PASSES if by_turns else MAX_IDLE
        if text.opened_by:
            text.gains.pop(text.opened_by, None)
            text.opened, text.opened_by = True, ""
        return spec.max_draft

    def _change_users(self, users: int) -> None:
        """With fewer of them a row costs less than when drafters were found not to pay."""
        self._share = users**-0.5
        if users > self._users:
            self._users = users
        elif users < FEWER_USERS * self._users:
            self._users = users
            for text in self._texts.values():
                text.idle = 0

    def _text(self, seq: Seq) -> _Text:
        text = self._texts.get(seq.id)
        if text is None:
            route = f"{seq.route} {'sampled' if seq.params.temperature else 'greedy'}"
            text = self._texts[seq.id] = _Text(route)
            self._of_route[route] += 1
        return text

    def worth_asking(self, drafters: Sequence[str], seq: Seq) -> bool:
        """False where nobody would be asked.

        Only sequences for whom nobody was asked in the pass before are looked at; with a grammar, those that
        were idle. Where passes run beside the host, this is decided while one runs: the token that it gives
        is not in the sequence yet.
        """
        text = self._texts.get(seq.id)
        if text is None or not text.unasked or text.shadow.tokens or not seq.spec.adaptive:
            return True
        text.unasked = False
        first = text.plans == 1 and len(seq.tokens) == seq.prompt_len
        for drafter in drafters:
            time = self._draft_us.get(drafter)
            if first and not self._first_nodes(text, drafter, time, self._first_us):
                continue
            timed = time is not None and time.known
            if not timed or self._value(text, drafter, 1.0, 0.0) > 0 or self._may_explore(text, drafter):
                return True
            if text.trials.get(drafter) and not text.bank.plain:
                return True
        text.idled += 1
        if not first:
            self._let_idle(text)
        return False

    def budget(
        self, drafter: str, seq: Seq, nodes: int, reach: float = 1.0, gain: float = 0.0, forced: int = 0
    ) -> int:
        if not seq.spec.adaptive:
            return nodes
        text, time = self._texts.get(seq.id) or self._text(seq), self._draft_us.get(drafter)
        if len(seq.tokens) == seq.prompt_len:
            first_us = self._forced_us if forced or text.begins_forced else self._first_us
            nodes = min(nodes, self._first_nodes(text, drafter, time, first_us))
            if not nodes:
                return 0
        if time is None or not time.known:
            if drafter in self._untimed:  # its price is learned with one sequence
                text.wait = 0
                return 0
            self._untimed.add(drafter)
        # In the first pass, or in the second where there was no room in the first.
        begins = forced and reach == 1 and len(seq.tokens) <= seq.prompt_len + 1
        if begins and not text.opened and not text.opened_by:
            text.opened_by = drafter
            text.gains[drafter] = Gain(self._gain_of(text.route + FIRST, drafter))
        if self._value(text, drafter, reach, gain) > 0:
            length = self._length(text, drafter, time, reach, seq.spec.accept == "match")
            return length if length < nodes else nodes
        if reach == 1 and not gain and text.trials.get(drafter) and not text.bank.plain:
            return min(nodes, self._length(text, drafter, time, reach, seq.spec.accept == "match"))
        if reach == 1 and not gain and self._may_explore(text, drafter):
            spent = max(text.explored[drafter], text.to_explore - MAX_EXPLORED)
            text.explored[drafter] = spent + self._ask_price(text, drafter)
            self._explored -= self._start_price(text, drafter)
            may_cut = seq.spec.accept == "match" and self._node_price(drafter) < NOTICEABLE
            return nodes if may_cut else min(nodes, PROBE_NODES)
        return 0

    def _first_nodes(self, text: _Text, drafter: str, time: DraftTime | None, us: float) -> int:
        """Of a draft that delays a first token by no more than that, the time of drafting included."""
        if time is None or not time.known:
            return 0
        left, start = us - self._ask_us(text, drafter) - time.draft_us, self._start_us.get(drafter)
        if start is not None and drafter not in text.begun:
            left -= start.us
        return bisect_right(self._first_rows_us, left) if left > 0 else 0

    def value(self, drafter: str, seq: Seq, reach: float = 1.0, gain: float = 0.0) -> float:
        return self._value(self._text(seq), drafter, reach, gain)

    def reads(self, drafter: str, seq: Seq) -> bool:
        begun = len(seq.tokens) > seq.prompt_len
        return not seq.spec.adaptive or self._may_read(self._text(seq), drafter, begun)

    def _may_read(self, text: _Text, drafter: str, begun: bool) -> bool:
        """Decides for several passes at once, so that a head that does not pay costs next to nothing.

        begun: the text has its first token.
        """
        left = text.reads.get(drafter, 0)
        if not left:
            left = text.reads[drafter] = self._passes_to_read(text, drafter, begun)
        if begun:  # all passes of a prompt are one
            text.reads[drafter] = left - 1 if left > 0 else left + 1
            if text.trials.get(drafter):
                text.trials[drafter] -= 1
        return left > 0

    def _passes_to_read(self, text: _Text, drafter: str, begun: bool) -> int:
        """Above 0: so many; below 0: none of so many.

        A head that does not pay is tried on some texts from their beginning on, for their prompts are read
        only then. What the trials are expected to lose is EXPLORED of the time.
        """
        value = self._value(text, drafter, 1.0, 0.0, reading=True)
        if value > 0:
            return READ_PASSES
        if begun:
            return -UNREAD_PASSES
        if self._time(drafter) is None:  # its price is learned with one sequence
            if drafter in self._untimed:
                return -UNREAD_PASSES
            self._untimed.add(drafter)
        price = TRIAL_PASSES * max(-value, TRIAL_SHARE * self._ask_price(text, drafter))
        if self._explored < min(price, MAX_EXPLORED / 2):
            return -UNREAD_PASSES
        self._explored -= price
        text.trials[drafter] = TRIAL_PASSES
        return TRIAL_PASSES

    def _value(self, text: _Text, drafter: str, reach: float, gain: float, reading: bool = False) -> float:
        """reading: what the draft takes is still to be read; once a head has read it, that is no matter."""
        if text.bank.plain or reach < MIN_GAIN:
            return 0.0
        time = self._draft_us.get(drafter)
        price, us_price, us = self._row_price, self._us_price, self._ask_us(text, drafter)
        if time is not None and time.known:
            price += us_price * time.node_us
            us += time.draft_us
            if drafter not in text.begun and drafter in self._start_us:
                us += self._start_us[drafter].us_per_ask
        if reading:  # for the drafts of later passes
            reads, price = self._reads.get(drafter), price - self._row_price + self._later_row_price
            us += self._reading_us(drafter) * (reads.per_ask if reads is not None else 1.0)
        likely, of_drafter = CAUTION * reach, text.gains.get(drafter) or self._gain(text, drafter)
        return likely * of_drafter(price / likely) - gain - us_price * us - MIN_GAIN

    def _ask_us(self, text: _Text, drafter: str) -> float:
        """Of one more ask, but for the draft: once somebody was asked for a text, another one adds little."""
        own_us, slowdown = self.estimates.own_us, self._slowdown.get(drafter)
        us = OWN_FURTHER * own_us if text.asked else own_us
        return us if slowdown is None else us + slowdown.ask_us

    def _time(self, drafter: str) -> DraftTime | None:
        """None: not known yet."""
        time = self._draft_us.get(drafter)
        return time if time is not None and time.known else None

    def _reading_us(self, drafter: str) -> float:
        time, slowdown = self._read_us.get(drafter), self._slowdown.get(drafter)
        us = time.draft_us if time is not None else 0.0
        return us if slowdown is None else us + slowdown.read_us

    def _length(self, text: _Text, drafter: str, time: DraftTime | None, reach: float, may_cut: bool) -> int:
        """Drafts are cut once their scores are known: where nodes cost no time, they are as long as allowed.

        Else as many nodes more than are expected to pay as SPARE allows, since more than were asked for are
        never seen; at least one, and no more where drafts may not be cut. The first drafts are short and long
        by turns, to tell the time of a node from that of a draft.
        """
        node_price = 0.0
        if time is not None:
            if _is_timed(time):
                return PROBE_NODES
            node_price = self._us_price * time.node_us
        if may_cut and node_price < NOTICEABLE:
            return MAX_NODES
        spare = max(1, int(SPARE / node_price)) if may_cut else 1
        return spare + round(self._gain(text, drafter).nodes_above((self._row_price + node_price) / reach))

    def _node_price(self, drafter: str) -> float:
        time = self._time(drafter)
        return self._us_price * time.node_us if time is not None else 0.0

    def _may_explore(self, text: _Text, drafter: str) -> bool:
        if text.bank.plain and self._time(drafter) is None:
            return False
        spent = text.explored.get(drafter)
        if spent is None:
            spent = text.explored[drafter] = -self._unspent.pop((text.route, drafter), 0.0)
        missing = self._ask_price(text, drafter) - min(text.to_explore - spent, MAX_EXPLORED)
        if missing > 0:
            text.wait = min(text.wait, missing / (EXPLORED * self._share))
            return False
        text.wait = 0
        start = self._start_price(text, drafter)
        return start < NOTICEABLE or self._explored >= min(start, MAX_EXPLORED / 2)

    def _ask_price(self, text: _Text, drafter: str) -> float:
        time = self._time(drafter)
        return self._us_price * (
            (time(PROBE_NODES) if time is not None else 0.0) + self._ask_us(text, drafter)
        )

    def _start_price(self, text: _Text, drafter: str) -> float:
        """Of the first draft of a text, beyond that of a later one."""
        start = self._start_us.get(drafter)
        return 0.0 if start is None or drafter in text.begun else self._us_price * start.us

    def _gain(self, text: _Text, drafter: str) -> Gain:
        gain = text.gains.get(drafter)
        if gain is None:
            gain = text.gains[drafter] = Gain(self._gain_of(text.route, drafter))
        return gain

    def _gain_of(self, route: str, drafter: str) -> Gain:
        known = self._gains.get((route, drafter))
        if known is None:
            known = Gain()
            if drafter not in self._private:
                self._gains[route, drafter] = known
        return known

    def drafted(self, drafter: str, asks: Sequence[Ask], drafts: Sequence[Draft]) -> None:
        time = self._draft_us.get(drafter)
        is_timed = time is not None and _is_timed(time)
        for ask, draft in zip(asks, drafts, strict=True):
            text = self._texts.get(ask.seq.id) or self._text(ask.seq)
            text.asked, gain = True, text.gains.get(drafter) or self._gain(text, drafter)
            if not draft.tokens:
                gain.learn((), self._of_route[text.route])
                continue
            if not ask.after:
                text.begins_forced = _is_forced(draft)
            text.scored, text.chances = draft, self._chances(text, draft, len(ask.after))
            if not (is_timed and len(draft.tokens) == PROBE_NODES):  # which was cut short
                gain.learn(text.chances, self._of_route[text.route])

    def chances(self, seq: Seq, draft: Draft, depth: int = 0) -> list[float]:
        text = self._texts.get(seq.id) or self._text(seq)
        if draft is text.scored and draft.tokens:
            return text.chances
        return self._chances(text, draft, depth)

    def _chances(self, text: _Text, draft: Draft, depth: int) -> list[float]:
        given: list[float] = []
        for name, first, last in _runs(draft):
            at = depth + (first if draft.parents is None else draft.depth(first) - 1)
            source = text.sources.get(name) or self._source(text, name)
            given += source.acceptance.chances(_scores(draft, first, last), at, source.factor.value)
        if draft.parents is not None:
            for node, parent in enumerate(draft.parents):
                if parent != ROOT:
                    given[node] *= given[parent]
            return given
        reach = 1.0
        for node, chance in enumerate(given):
            given[node] = reach = reach * chance
        return given

    def _source(self, text: _Text, drafter: str) -> _Source:
        known = self._acceptance.get((text.route, drafter))
        if known is None:
            known = Acceptance()
            if drafter not in self._private:
                self._acceptance[text.route, drafter] = known
        source = text.sources[drafter] = _Source(known)
        return source

    def gain(self, seq: Seq, draft: Draft) -> float:
        row = self._row_price
        return sum([c - row for c in self.chances(seq, draft) if c > row])

    def trim(self, seqs: Sequence[Seq], drafts: Sequence[Draft], rows: int) -> list[int]:
        """Adds nodes of all sequences by their chances, while their tokens exceed the price of their time."""
        lengths: list[int] = []
        chances: dict[int, list[float]] = {}
        context = 0
        for i, (seq, draft) in enumerate(zip(seqs, drafts, strict=True)):
            if len(seq.tokens) > context:
                context = len(seq.tokens)
            lengths.append(len(draft.tokens))
            if draft.tokens and seq.spec.adaptive and seq.spec.accept == "match":
                lengths[i], text = 0, self._texts.get(seq.id) or self._text(seq)
                if not text.bank.plain:
                    likely = text.chances if draft is text.scored else self._chances(text, draft, 0)
                    if len(seq.tokens) == seq.prompt_len:
                        first_us = self._forced_us if _is_forced(draft) else self._first_us
                        likely = likely[: bisect_right(self._first_rows_us, first_us)]
                    chances[i] = likely
        if not chances:
            return lengths
        ordered = _by_chance(chances)
        us = self.cost.curve(rows + sum(lengths), len(ordered) + 1, context)
        tokens, best, taken, price, plain_us = 0.0, MIN_GAIN, 0, self._us_price, us[0]
        for added, (minus_chance, _, _) in enumerate(ordered, 1):
            tokens -= CAUTION * minus_chance
            gain = tokens - price * (us[added] - plain_us)
            if gain > best:
                best, taken = gain, added
        for _, i, node in ordered[:taken]:
            lengths[i] = node + 1
        return lengths

    def learn(self, rounds: Sequence[Round]) -> None:
        if not rounds:
            return
        first, count, cost = rounds[0], len(rounds), self.cost
        nodes = context = tokens = users = planned = 0
        asked, read = dict[str, int](), dict[str, int]()  # by drafter
        for r in rounds:
            nodes += len(r.draft.tokens)
            planned += r.budget
            for name in r.asked:
                asked[name] = asked.get(name, 0) + 1
            for name in r.readers:
                read[name] = read.get(name, 0) + 1
            if r.start > context:
                context = r.start
            if r.tokens:
                tokens, users = tokens + len(r.tokens), users + 1
        decoding = first.rows == count + nodes  # no prompt is in the pass
        alone_us = 0.0  # of the pass without drafts
        if decoding:
            if not self._gave_first(rounds):
                self._learn_pass(count, first, context, asked, read)
            alone_us = cost(count, context)
            self._learn_speed(first, tokens / count * alone_us)
        after_prompt, self._after_prompt = self._after_prompt, not decoding
        ask_us: Mapping[str, float] = {}
        if asked or read:
            ask_us = self._learn_draft_times(rounds, asked, read, after_prompt)
        token_price = node_price = 0.0
        if ask_us or nodes:
            if cost.measured:
                token_price = users / (alone_us if users == count and decoding else cost(users, context))
                if nodes:
                    before = alone_us if decoding else cost(first.rows - nodes, context)
                    node_price = token_price * (cost(first.rows, context) - before) / nodes
            else:
                token_price = users / max(1, first.target_us)
        if planned:
            for r in rounds:
                if r.budget and r.tokens and (text := self._texts.get(r.request)) is not None:
                    self._learn_text(text, r, ask_us, token_price, node_price)
        explored = self._explored + EXPLORED * tokens * min(1.0, len(self._texts) / count)
        self._explored = explored if explored < MAX_EXPLORED / 2 else MAX_EXPLORED / 2

    def _learn_pass(
        self,
        users: int,
        r: Round,
        context: int,
        asked: Mapping[str, int],
        read: Mapping[str, int],
    ) -> None:
        """Its time is that of its rows, and what heads add: their asks, and the reading of hidden states."""
        cost, us, added_us = self.cost, max(1, r.target_us), 0.0
        if heads := self._reads.keys() | read.keys():
            counts = {
                name: (asked.get(name, 0), read.get(name, 0))
                for name in heads
                if name in asked or name in read
            }
            added_us = self._slowdown_fit(counts)
            self._slowdown_fit.learn((users, r.rows), us / cost.prior(r.rows, context), us, counts)
        cost.learn(r.rows, us - added_us, context)

    def _gave_first(self, rounds: Sequence[Round]) -> bool:
        """True for a pass with a first token: its time holds what happens once, such as the first masks."""
        if not self._awaited:
            return False
        begun = self._awaited.intersection([r.request for r in rounds if r.tokens])
        self._awaited -= begun
        return bool(begun)

    def _learn_text(
        self,
        text: _Text,
        r: Round,
        ask_us: Mapping[str, float],
        token_price: float,
        node_price: float,
    ) -> None:
        """token_price, node_price: tokens that a microsecond, and a row of this pass, could have brought."""
        bank, count = text.bank, len(r.tokens)
        is_first = not bank.tokens
        self._count_tokens(text, count)
        if r.asked:
            asked_us = 0.0
            for name in r.asked:
                asked_us += ask_us[name]
            cost = token_price * asked_us + node_price * len(r.draft.tokens)
            bank.add(count - 1, cost, MAX_DEBT * max(self._share, DEBT_OF_MANY))
            if count - 1 > cost:
                text.to_explore += EXPLORED_SAVINGS * (count - 1 - cost)
        if text.shadow.tokens or r.uncut.tokens:
            self._compare(text, r)
        elif not r.asked and not is_first:
            self._let_idle(text)

    def _let_idle(self, text: _Text) -> None:
        """Until one of the drafters may be asked again.

        Sequences are considered together, in one of IDLE_PASSES + 1 passes: others ask nobody.
        """
        wait = text.bank.plain if 0 < text.bank.plain < text.wait else text.wait
        text.idle = max(int(wait), IDLE_PASSES)
        if self._users > 1:
            text.idle += IDLE_PASSES // 2 - (self._passes + text.idle + IDLE_PASSES // 2 + 1) % (
                IDLE_PASSES + 1
            )

    def _learn_idle(self, text: _Text) -> None:
        """From the passes since drafters were considered: each had a token and no draft."""
        tokens, text.idled = text.idled, 0
        for gain in text.gains.values():
            gain.age(tokens)
        self._count_tokens(text, tokens)

    def _count_tokens(self, text: _Text, tokens: int) -> None:
        bank = text.bank
        if not bank.tokens:
            text.to_explore += FIRST_EXPLORED * self._share
        text.to_explore += EXPLORED * self._share * tokens
        bank.tokens += tokens
        if bank.plain:
            bank.plain = max(0, bank.plain - tokens)

    def _learn_speed(self, first: Round, plain_us: float) -> None:
        """plain_us: as long as the tokens of the pass would have taken without drafts."""
        known = self.estimates
        known.plain_us = SPEED_DECAY * known.plain_us + plain_us
        known.real_us = SPEED_DECAY * known.real_us + first.target_us + first.draft_us

    def _learn_draft_times(
        self, rounds: Sequence[Round], asks: Mapping[str, int], read: Mapping[str, int], after_prompt: bool
    ) -> Mapping[str, float]:
        """asks, read: texts by drafter. Returns the time of one ask, by drafter.

        Hidden states are those of the pass before: after one with a prompt, they tell nothing.
        """
        r, by = rounds[0], rounds[0].draft_us_by
        for name, count in read.items():
            read_us = by.get(name) if name not in asks else None
            self._learn_reading(name, count, asks.get(name, 0), read_us, r.target_us, after_prompt)
        if not asks:
            return {}
        # Those that were not the first of their sequence count for less.
        firsts = sum([1 + OWN_FURTHER * (len(s.asked) - 1) for s in rounds if s.asked])
        own_us, known = max(0.0, r.draft_us - sum(by.values())) / firsts, self.estimates
        if not after_prompt:
            before = known.own_us
            share = OWN_SHARE if own_us > before else OWN_FALL
            known.own_us += share * (min(own_us, MAX_OUTLIER * before or own_us) - before)
        if own_us > MAX_OUTLIER * known.own_us:
            own_us = MAX_OUTLIER * known.own_us
        own_us *= firsts / sum(asks.values())  # of an ask, on average
        begun = [name for s in rounds if s.asked for name in self._begin(s)]
        ask_us: dict[str, float] = {}
        for name, count in asks.items():
            skipped = after_prompt and name in read  # its time holds the reading of the prompt
            nodes, first = 0, begun.count(name)
            for s in rounds:
                nodes += s.uncut.sources.count(name)
            us = by.get(name, 0) / count
            slowdown = self._slowdown.get(name)
            ask_us[name] = own_us + self._learn_draft_time(name, count, first, nodes / count, us, r, skipped)
            ask_us[name] += slowdown.ask_us if slowdown is not None else 0.0
        return ask_us

    def _begin(self, r: Round) -> list[str]:
        """The drafters that were asked for this text for the first time."""
        text = self._texts.get(r.request)
        if text is None or text.begun.issuperset(r.asked):
            return []
        new = [name for name in r.asked if name not in text.begun]
        text.begun.update(new)
        return new

    def _learn_draft_time(
        self, name: str, asked: int, begun: int, nodes: float, us: float, r: Round, skipped: bool
    ) -> float:
        """Returns the time to charge for one ask. A text pays by and by for its first draft.

        us: of one of so many asks. begun: texts among them that had no draft by this drafter before.
        """
        time, start = self._draft_us.get(name), self._start_us.get(name)
        if time is None or start is None:
            time, start = self._draft_us.setdefault(name, DraftTime()), StartTime()
            self._start_us[name] = start
        max_us = r.target_us / r.batch
        start.count(asked, begun)
        if begun and time.known and us > time(nodes):  # a shorter one tells of later drafts, too
            start.learn(asked * (us - time(nodes)) / begun, max_us)
            return time(nodes) + start.us_per_ask
        if not skipped or not time.known:
            time.learn(nodes, us, max_us, steady=True)
        return min(us, max_us if begun else MAX_OUTLIER * time(nodes))

    def _learn_reading(
        self, name: str, read: int, asked: int, us: int | None, target_us: int, after_prompt: bool
    ) -> None:
        """A head may leave hidden states for later and read many at once: the mean says what that takes.

        us: None where the drafter was asked as well. After a prompt it is that of the whole prompt, which
        says nothing of a pass.
        """
        reads, time = self._reads.get(name), self._read_us.get(name)
        if reads is None:
            reads = self._reads[name] = ReadShare()
        reads.learn(read, asked)
        if us is None or after_prompt:
            return
        if time is None:
            time = self._read_us[name] = DraftTime()
            time.learn(0, FIRST_READING * target_us)
        time.learn(0, us / read, target_us)

    def _compare(self, text: _Text, r: Round) -> None:
        """Compares the draft, and one that was cut earlier, with the tokens that were committed.

        So drafts are scored in the shadow too: nodes that were never verified. A shadow that has missed a
        token is over.
        """
        draft, tokens = r.uncut, r.tokens
        if text.shadow.tokens:
            missed = text.after != r.start
            text.node = _ENDED if missed else self._walk(text, text.shadow, text.node, tokens)
            if text.node == _ENDED:
                text.shadow = NO_DRAFT
        if draft.tokens:
            node = self._walk(text, draft, ROOT, tokens)
            if node != _ENDED and not text.shadow.tokens:
                text.shadow, text.node = draft, node
        text.after = r.start + len(tokens)

    def _walk(self, text: _Text, draft: Draft, node: int, tokens: Sequence[int]) -> int:
        """Learns from each node that a token reaches, from `node` on; the last that came true, or _ENDED."""
        if draft.parents is not None:
            return self._walk_tree(text, draft, node, tokens)
        first = right = node + 1  # right: the first node that no token has confirmed
        count, last = len(draft.tokens), first + len(tokens)
        stop = last if last < count else count
        while right < stop and draft.tokens[right] == tokens[right - first]:
            right += 1
        end = right + 1 if right < stop else right  # of the nodes observed, a wrong one included
        for source, start, after in _runs(draft):
            a, b = start if start > first else first, after if after < end else end
            if a < b:
                self._observe(text, source, _scores(draft, a, b), a, (right if right < b else b) - a)
        return end - 1 if right == last and end < count else _ENDED

    def _walk_tree(self, text: _Text, draft: Draft, node: int, tokens: Sequence[int]) -> int:
        for token in tokens:
            right = _ENDED
            for child in draft.children(node):
                accepted = draft.tokens[child] == token
                right = child if accepted else right
                source = draft.sources[child] if draft.sources else ""
                self._observe(
                    text, source, _scores(draft, child, child + 1), draft.depth(child) - 1, int(accepted)
                )
            if right == _ENDED:
                return _ENDED
            node = right
        return node if draft.children(node) else _ENDED

    def _observe(
        self, text: _Text, name: str, scores: Sequence[float | None], depth: int, accepted: int
    ) -> None:
        source = text.sources.get(name) or self._source(text, name)
        expected, certain = source.acceptance.learn(scores, depth, accepted), scores.count(1.0)
        if certain < len(scores):
            source.factor.learn(len(scores) - certain, expected, max(0, accepted - certain))

    def end(self, seq: Seq) -> None:
        self._awaited.discard(seq.id)
        text = self._texts.pop(seq.id, None)
        if text is None:
            return
        self._of_route[text.route] -= 1
        if not self._of_route[text.route]:
            del self._of_route[text.route]
        for drafter, spent in text.explored.items():
            kept = self._unspent.get((text.route, drafter), 0.0) + max(0.0, text.to_explore - spent)
            self._unspent[text.route, drafter] = min(kept, MAX_EXPLORED / 2)

    def forget(self, drafter: str) -> None:
        self.estimates.forget(drafter)
        self._slowdown_fit.forget(drafter)
        self._reads.pop(drafter, None)
        self._unspent = {key: left for key, left in self._unspent.items() if key[1] != drafter}
        for text in self._texts.values():
            text.gains.pop(drafter, None)
            text.sources.pop(drafter, None)
            text.explored.pop(drafter, None)
            text.reads.pop(drafter, None)
            text.trials.pop(drafter, None)
            text.begun.discard(drafter)
            if drafter in text.shadow.sources:
                text.shadow = NO_DRAFT


_ENDED: Final = -2  # no node: the walk through a draft is over


def _is_forced(draft: Draft) -> bool:
    """True if the grammar forces its first node."""
    return draft.q is None and bool(draft.scores) and draft.scores[0] == FORCED


def _is_timed(time: DraftTime) -> bool:
    """True for the short ones of a drafter's first drafts."""
    return time.observed < TIMED_DRAFTS and time.observed % 2 == 1


def _runs(draft: Draft) -> list[tuple[str, int, int]]:
    """Nodes in a row by one drafter: source, first, and the one after the last. In a tree each is alone."""
    count = len(draft.tokens)
    sources = draft.sources or ("",) * count
    if draft.parents is not None:
        return [(source, i, i + 1) for i, source in enumerate(sources)]
    if sources[0] == sources[-1] and sources.count(sources[0]) == count:
        return [(sources[0], 0, count)]
    starts = [i for i in range(count) if not i or sources[i] != sources[i - 1]]
    return [(sources[i], i, j) for i, j in zip(starts, [*starts[1:], count], strict=True)]


def _scores(draft: Draft, first: int, last: int) -> Sequence[float | None]:
    return draft.scores[first:last] if draft.scores else (None,) * (last - first)


def _by_chance(chances: Mapping[int, Sequence[float]]) -> list[tuple[float, int, int]]:
    """All nodes as (-chance, draft, node), most likely first; no node before an earlier one of its draft."""
    ordered: list[tuple[float, int, int]] = []
    for i, of_draft in chances.items():
        smallest = 1.0
        for node, chance in enumerate(of_draft):
            if chance < smallest:
                smallest = chance
            ordered.append((-smallest, i, node))
    if len(chances) > 1:
        ordered.sort()
    return ordered
