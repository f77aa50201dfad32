"""Errors, as one tree.

PacelineError                 one line for the user; the command line exits with 2
 ├─ UsageError                an argument is unknown, is missing, or contradicts another
 │   └─ SettingError          the value of one setting cannot be used
 ├─ ModelError
 │   ├─ UnknownModel          no such name, folder or file
 │   ├─ UnknownArchitecture   the weights are of a family paceline cannot run
 │   ├─ CorruptModel          a model file is damaged, truncated or not what it claims to be
 │   └─ PullError             a download failed; what was there before is untouched
 ├─ TextError                 a chat template or a tokenizer cannot process a text
 ├─ ConstraintError           a schema, grammar or tool cannot be enforced, or an output does not follow it
 ├─ PromptTooLong             the prompt does not fit the model's context
 ├─ Busy                      too many requests wait already; try again later
 ├─ BatchError                some prompts of a batch failed; it has the answers of the others
 ├─ ShuttingDown              the server admits no request, and ends those still running
 ├─ TimedOut                  a request's deadline passed before it ended
 ├─ CacheFull                 the KV cache is full of running sequences
 ├─ OutOfMemory               the device has too little memory for a training step
 ├─ DrafterMismatch           a drafter cannot draft for this target
 ├─ StoreError                the trace store cannot be opened, read or written
 │   └─ DamagedStore          its file is no database any more
 ├─ WireError                 a message of the split protocol cannot be read
 ├─ DataError                 a file of conversations or answers to train on cannot be read
 └─ NotCompiled               native code could not be built or loaded; a slower path does the same work
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final


class PacelineError(Exception):
    """One line: the fault, what was expected, what to do."""


class UsageError(PacelineError):
    pass


class _Hidden:
    def __repr__(self) -> str:
        return "..."


HIDDEN: Final = _Hidden()  # stands for a value that a message must not repeat


class SettingError(UsageError):
    """Carries the setting, its value and what was expected: nothing has to be read out of the message."""

    def __init__(self, setting: str, value: object, expected: str, hint: str = "") -> None:
        super().__init__(setting, value, expected, hint)
        self.setting, self.value, self.expected, self.hint = setting, value, expected, hint

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.setting}={short(self.value)} is not usable: expected {self.expected}{hint}"

    def renamed(self, setting: str) -> "SettingError":
        """The same error for a caller who knows the setting by another name."""
        return SettingError(setting, self.value, self.expected, self.hint)


class ModelError(PacelineError):
    @classmethod
    def unreadable(cls, path: Path, error: OSError) -> "ModelError":
        """path: the model, named where the system does not say which file is meant."""
        file = Path(error.filename) if isinstance(error.filename, str) else path
        return cls(f"{file.name} cannot be read: {error.strerror or error}")


class UnknownModel(ModelError):
    pass


class UnknownArchitecture(ModelError):
    pass


class CorruptModel(ModelError):
    pass


class PullError(ModelError):
    pass


class TextError(PacelineError):
    pass


class ConstraintError(PacelineError):
    """`param` is the part of a request that is at fault: "tools[1].function.parameters"; None: not known."""

    def __init__(self, reason: str, param: str | None = None) -> None:
        super().__init__(reason, param)
        self.reason, self.param = reason, param

    def __str__(self) -> str:
        return self.reason if self.param is None else f"{self.param}: {self.reason}"

    def within(self, param: str) -> "ConstraintError":
        """The same error in a part of a request; one that knows its part keeps it."""
        return self if self.param is not None else ConstraintError(self.reason, param)


class PromptTooLong(PacelineError):
    @classmethod
    def of(cls, tokens: str, limit: int, by_setting: bool) -> "PromptTooLong":
        """by_setting: the limit is max_model_len, not the model's own."""
        limited = f"max_model_len is {limit}" if by_setting else f"the model's context holds {limit}"
        return cls(
            f"the prompt has {tokens} tokens and {limited}, one of them for the answer: shorten the prompt"
        )


class Busy(PacelineError):
    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # an estimate


class BatchError(PacelineError):
    """`results`: for each prompt its Result, or the error that it failed with."""

    def __init__(self, results: Sequence[Any]) -> None:
        super().__init__(results)
        self.results = list(results)

    def __str__(self) -> str:
        failed = [(i, r) for i, r in enumerate(self.results) if isinstance(r, PacelineError)]
        first, error = failed[0]
        return (
            f"{len(failed)} of {len(self.results)} prompts failed, prompts[{first}] first: {error}; "
            "`results` of this error has the other answers"
        )


class ShuttingDown(PacelineError):
    def __init__(self, message: str = "the server is shutting down: try again later") -> None:
        super().__init__(message)


class TimedOut(PacelineError):
    pass


class CacheFull(PacelineError):
    pass


class OutOfMemory(PacelineError):
    pass


class DrafterMismatch(PacelineError):
    pass


class StoreError(PacelineError):
    pass


class DamagedStore(StoreError):
    pass


class WireError(PacelineError):
    """`code`: one word for the other side of the connection."""

    def __init__(self, message: str, code: str = "malformed_message") -> None:
        super().__init__(message, code)
        self.message, self.code = message, code

    def __str__(self) -> str:
        return self.message


class DataError(PacelineError):
    pass


class NotCompiled(PacelineError):
    pass


def short(value: object, limit: int = 60) -> str:
    """The value's repr, cut to `limit` characters."""
    shown = repr(value[: limit + 1] if isinstance(value, str | bytes | tuple | list) else value)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def one_line(error: BaseException, limit: int = 160) -> str:
    """An exception's text without line breaks, cut to `limit` characters; it may quote anything."""
    line = " ".join(str(error)[: 4 * limit].split()) or type(error).__name__
    return line if len(line) <= limit else f"{line[:limit]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest to a wrong one, as a question; empty if none is near."""
    near = get_close_matches(name[:100], list(known), 1)
    return f"did you mean {near[0]!r}?" if near else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Says that there is no `kind` of this name: a suggestion, then the names there are."""
    known = list(known)
    hint = did_you_mean(name, known)
    return f"unknown {kind} {short(name)}{f'; {hint}' if hint else '.'} Known: {', '.join(known)}"
