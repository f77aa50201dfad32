"""The process that compiles large grammars first; it may be killed for its time or its memory.

Run by path: it needs llguidance and nothing of this package, so that it starts soon and stays small. Messages
on stdin and stdout are a length of four bytes and JSON. The first one is the tokenizer; each further one is a
grammar with its limits, and gets the error, or null, the bytes that the grammar took, and the bytes that the
process now holds beyond those at its start.
"""

import json
import os
import signal
import threading
from typing import Any, BinaryIO

NICE = 10
STACK_BYTES = 4 << 20  # half of what a thread of the server has: recursion that fits here fits there


def read(stream: BinaryIO) -> Any:
    """None at the end of the stream."""
    size = stream.read(4)
    return json.loads(stream.read(int.from_bytes(size, "little"))) if len(size) == 4 else None


def write(stream: BinaryIO, message: Any) -> None:
    data = json.dumps(message).encode("utf-8", "surrogatepass")
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def compile_grammar(
    library: Any, tables: Any, grammar: str, limits: dict[str, int], max_forced: int | None
) -> Any:
    """A matcher at the start of the grammar, and the error that compiling or its first mask made.

    max_forced: bytes of fixed text at its start. None: the grammar forces nothing.
    """
    given = library.LLParserLimits(verbose_errors=False, **limits)
    matcher = library.LLMatcher(tables, grammar, log_level=0, limits=given)
    if matcher.is_error():
        return matcher, matcher.get_error()
    first = matcher.deep_copy()  # a grammar that no text fits fails only when its first mask is computed
    first.compute_bitmask()
    if first.is_error():
        return first, first.get_error()
    if max_forced is not None and (forced := len(first.compute_ff_bytes())) > max_forced:
        return first, f"{forced:,} bytes or more of fixed text in a row: at most {max_forced:,} are taken"
    return matcher, None


def status(field: str) -> int:
    """Bytes of this process, by a field of /proc/self/status; 0 where there is none."""
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        return 0


def limit_memory(more: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    if held := status("VmSize"):
        resource.setrlimit(resource.RLIMIT_AS, (held + more, held + more))


def limit_time(seconds: float) -> None:
    """CPU time until the process is killed; 0: no limit."""
    if hasattr(signal, "ITIMER_PROF"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    import llguidance

    setup = read(incoming)
    tables = llguidance.LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["eos"])
    compile_grammar(llguidance, tables, "start: /a/", {}, setup["max_forced"])
    limit_memory(setup["memory"] + STACK_BYTES)
    write(outgoing, None)
    start = status("VmRSS")
    while (job := read(incoming)) is not None:
        before = status("VmRSS")
        limit_time(setup["seconds"])
        try:
            max_forced = setup["max_forced"] if job["forces"] else None
            error = compile_grammar(llguidance, tables, job["grammar"], job["limits"], max_forced)[1]
        except MemoryError:
            os._exit(1)
        limit_time(0)
        after = status("VmRSS")
        write(outgoing, [error, max(0, after - before), max(0, after - start)])


def main() -> None:
    if hasattr(os, "nice"):
        os.nice(NICE)
    incoming, outgoing = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the messages
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(incoming, outgoing))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
