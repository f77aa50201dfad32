"""How it stands with a process."""

import subprocess


def state(pid: int) -> str:
    """T: stopped. Nothing: there is no such process, or nothing of it but its number."""
    found = subprocess.run(
        ["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()[:1].replace("Z", "")
