"""What a reader of tool calls tells, in the order of the text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextEvent:
    """What is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call; Arguments follow, then Ended or Broken."""

    name: str
    at: int  # where it begins in the whole text, its trigger included


@dataclass(frozen=True, slots=True)
class CallArguments:
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    pass


@dataclass(frozen=True, slots=True)
class CallError:
    """What looked like a call cannot be read as one. The text from `end` on follows as Text."""

    problem: str
    at: int  # where it begins in the whole text, its trigger included
    end: int  # the same, unless Begun was told

    @property
    def begun(self) -> bool:
        return self.end > self.at


Event = TextEvent | CallBegin | CallArguments | CallEnd | CallError
