"""Everything that can go wrong, as one tree.

PacelineError                 one line for the user; the command line exits with 2
 ├─ SettingError              a setting is unknown or out of range
 ├─ ModelError
 │   ├─ UnknownModel          no such name, folder or file
 │   ├─ UnknownArchitecture   the weights are of a family paceline cannot run
 │   ├─ CorruptModel          a model file is damaged, truncated or not what it claims to be
 │   └─ PullError             a download failed; what was there before is untouched
 ├─ TextError                 a chat template or tokenizer cannot do what was asked
 ├─ ConstraintError           a schema, grammar or tool list cannot be enforced, or an output cannot follow it
 ├─ PromptTooLong             the prompt does not fit the model's context
 ├─ Busy                      too many requests wait already; later there may be room
 ├─ ShuttingDown              the server lets nothing new in, and ends what still runs
 ├─ TimedOut                  a request's deadline came before its end
 ├─ CacheFull                 no room in the KV cache for the sequences now running
 ├─ OutOfMemory               the device has no room for a step of training
 ├─ DrafterMismatch           a drafter cannot draft for this target
 ├─ StoreError                the trace store cannot be opened, read or written
 ├─ DataError                 a file of conversations or answers to train on cannot be read
 └─ NotCompiled               native code could not be built or loaded; the same work is done slower
"""


def short(value: object, most: int = 60) -> str:
    """A value that came from outside, as an error shows it."""
    shown = repr(value[: most + 1] if isinstance(value, str | bytes | tuple | list) else value)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


class PacelineError(Exception):
    """Says what was wrong, what was expected and what to do, in one line."""


class SettingError(PacelineError):
    pass


class ModelError(PacelineError):
    pass


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
    pass


class PromptTooLong(PacelineError):
    pass


class Busy(PacelineError):
    pass


class ShuttingDown(PacelineError):
    def __init__(self) -> None:
        super().__init__("the server is shutting down: try again later")


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


class DataError(PacelineError):
    pass


class NotCompiled(PacelineError):
    pass
