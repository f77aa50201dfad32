"""All stop strings of a request in one automaton (Aho and Corasick 1975, doi 10.1145/360825.360855).

Each character of the output costs the same, however many stop strings there are.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

START: Final = 0  # the state of an empty text
MAX_CACHED: Final = 8  # automata


class StopAutomaton:
    """A state is the longest end of the text that begins a stop string. Immutable: requests share it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._depth = [0]  # [states] characters of the beginning that a state stands for
        self._complete = [0]  # [states] length of the longest stop string that ends here; 0: none
        self._shorter = [START]  # [states] the state of the longest proper end of the same text
        for text in stop:
            self._add(text)
        self._link()

    def _add(self, text: str) -> None:
        state = START
        for character in text:
            child = self._next.setdefault((state, character), len(self._depth))
            if child == len(self._depth):
                self._depth.append(self._depth[state] + 1)
                self._complete.append(0)
                self._shorter.append(START)
            state = child
        self._complete[state] = len(text)

    def _link(self) -> None:
        """Breadth first: the shorter ends of a state's text are linked before it."""
        children: dict[int, list[tuple[str, int]]] = {}
        for (state, character), child in self._next.items():
            children.setdefault(state, []).append((character, child))
        queue = deque([START])
        while queue:
            state = queue.popleft()
            for character, child in children.get(state, ()):
                if state != START:
                    self._shorter[child] = self.after(self._shorter[state], character)
                self._complete[child] = self._complete[child] or self._complete[self._shorter[child]]
                queue.append(child)

    def after(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (child := self._next.get((state, character))) is None:
            if state == START:
                return START
            state = self._shorter[state]
        return child

    def complete(self, state: int) -> int:
        """The length of the longest stop string that the text ends with; 0: none."""
        return self._complete[state]

    def begun(self, state: int) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return self._depth[state]


@lru_cache(MAX_CACHED)
def stop_automaton(stop: tuple[str, ...]) -> StopAutomaton:
    """The choices of a request share one, and so do requests with the same stop strings."""
    return StopAutomaton(stop)
