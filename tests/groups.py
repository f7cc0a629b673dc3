"""Runs every test, one process per group, so that no two frameworks meet in one process: ``python tests/groups.py [GROUP …]``.

All groups run, also after one has failed; the exit code is 0 only when each of them ran at least one test and none failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {
    "core": ("core", "rules", "sinks", "tensorboard"),  # no framework is imported here
    "torch": ("torch", "lightning"),
    "keras": ("keras",),
    "examples": ("examples",),  # README, examples and the demo, each program in a process of its own
}
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)\b")


def run(folders: tuple[str, ...]) -> tuple[int, Counter[str]]:
    """The exit code of pytest over ``folders`` below tests/, and what its closing line counts."""
    present = [f"tests/{folder}" for folder in folders if (ROOT / "tests" / folder).is_dir()]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *present]
    if not present:
        print(f"none of these folders is there: {', '.join(folders)}")
        return 1, Counter()
    closing = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            closing = line if line.strip() else closing
    return process.returncode, Counter({kind.rstrip("s"): int(number) for number, kind in COUNT.findall(closing)})


def main(names: list[str]) -> int:
    """Run the named groups, or all of them."""
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        print(f"unknown group {unknown[0]!r}; one of {', '.join(GROUPS)}")
        return 2
    lines, bad, total = [], [], Counter[str]()
    for name in names or GROUPS:
        print(f"---- {name}: {', '.join(GROUPS[name])}", flush=True)
        started = time.monotonic()
        code, counts = run(GROUPS[name])
        total += counts
        if code:
            bad.append(name)
        verdict = "ok" if code == 0 else "no test was run" if code == 5 else f"FAILED (pytest's exit code {code})"
        told = ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "nothing counted"
        lines.append(f"{name:<10} {verdict:<32} {told} in {time.monotonic() - started:.0f} s")
    print("----", *lines, sep="\n")
    print(f"{total['passed']} passed, {total['failed'] + total['error']} failed, {total['skipped']} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
