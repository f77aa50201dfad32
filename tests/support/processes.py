"""How it stands with a process."""

import subprocess
from pathlib import Path


def state(pid: int) -> str:
    """T: stopped. Nothing: there is no such process, or nothing of it but its number."""
    if Path("/proc/self/stat").exists():  # tests ask a hundred times a second, and ps takes 5 ms
        try:
            found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        except (FileNotFoundError, ProcessLookupError):
            return ""
    else:
        ps = ["ps", "-o", "state=", "-p", str(pid)]
        found = subprocess.run(ps, capture_output=True, text=True, check=False).stdout
    return found.strip()[:1].replace("Z", "").replace("X", "")
