"""The automaton of stop strings against a search of the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text import StopChecker
from paceline.text.stop_strings import START, StopAutomaton, stop_automaton
from support import examples

letters = st.sampled_from("abé👍")
texts = st.text(letters, max_size=40)
stops = st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=8)


@settings(max_examples=examples(500))
@given(text=texts, stop=stops)
def test_a_state_knows_the_longest_stop_and_the_longest_beginning_of_one(text: str, stop: list[str]) -> None:
    automaton, state = StopAutomaton(stop), START
    for end, character in enumerate(text, 1):
        state, so_far = automaton.after(state, character), text[:end]
        assert automaton.complete(state) == max((len(s) for s in stop if so_far.endswith(s)), default=0)
        beginnings = [s[:n] for s in stop for n in range(1, len(s) + 1)]
        assert automaton.begun(state) == max((len(b) for b in beginnings if so_far.endswith(b)), default=0)


class CountingAutomaton(StopAutomaton):
    """Counts the transitions that are looked up."""

    def __init__(self, stop: list[str]) -> None:
        super().__init__(stop)
        self.lookups = 0
        transitions, counter = self._next, self

        class Counted(dict[tuple[int, str], int]):
            def get(self, key: tuple[int, str], default: int | None = None) -> int | None:  # type: ignore[override]
                counter.lookups += 1
                return super().get(key, default)

        self._next = Counted(transitions)


def test_a_character_costs_the_same_for_any_number_of_stop_strings() -> None:
    text = "the quick brown fox " * 50
    lookups = []
    for count in (1, 20_000):
        automaton, state = CountingAutomaton([f"the quick {i:x}" for i in range(count)]), START
        for character in text:
            state = automaton.after(state, character)
        lookups.append(automaton.lookups)
    assert lookups[1] <= 2 * len(text)
    assert lookups[0] <= 2 * len(text)


def test_choices_of_a_request_share_the_automaton() -> None:
    assert stop_automaton(("a", "b")) is stop_automaton(("a", "b"))


class Letters:
    """Token i is the i-th letter."""

    strips_first_space = False

    def shown(self, token: int, skip_special: bool) -> bytes:
        return b"abcdefgh"[token : token + 1]


def test_the_reader_gets_the_text_that_the_engine_has_matched() -> None:
    checker = StopChecker(Letters(), ["de", "x"])
    assert [checker(token) for token in range(5)] == [False, False, False, False, True]
    assert [checker.push(token) for token in range(5)] == ["a", "b", "c", "", ""]
    assert checker.flush() == ""


def test_the_reader_gets_a_held_beginning_at_the_end() -> None:
    checker = StopChecker(Letters(), ["dx"])
    assert not any(checker(token) for token in range(4))
    assert "".join(checker.push(token) for token in range(4)) + checker.flush() == "abcd"
