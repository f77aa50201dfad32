"""The process that runs a model's code. Run by path: it imports nothing of this package.

stdin: the limits as JSON, a nonce, then the program. The nonce is printed once the program has run to its
end: one that exits early prints nothing.
"""

import json
import sys
from typing import Any

REFUSED = (  # audit events, by prefix
    *(
        "ctypes.",
        "os.chmod",
        "os.chown",
        "os.exec",
        "os.fork",
        "os.kill",
        "os.link",
        "os.mkdir",
        "os.posix_spawn",
    ),
    *(
        "os.putenv",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.spawn",
        "os.symlink",
        "os.system",
        "os.truncate",
    ),
    *("pty.", "shutil.", "signal.", "socket.", "subprocess.", "syslog."),
)
WRITES = 0o3  # O_WRONLY | O_RDWR


def limit(limits: dict[str, int]) -> None:
    """limits: by the names of the module `resource`."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is refused")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
        raise PermissionError("writing files is refused")


def main() -> None:
    limits, nonce = json.loads(sys.stdin.readline()), sys.stdin.readline().strip()
    program = sys.stdin.read()
    limit(limits)
    sys.addaudithook(refuse)
    exec(compile(program, "answer", "exec"), {"__name__": "answer"})
    output = sys.__stdout__
    if output is not None:
        output.write(f"\n{nonce}")


if __name__ == "__main__":
    main()
