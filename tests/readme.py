"""Writes the table of rules into the README: ``python tests/readme.py`` (or ``make readme``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
START, END = "<!-- rules -->\n", "<!-- /rules -->"

if __name__ == "__main__":
    table = subprocess.run([sys.executable, "-m", "trainvet", "rules", "--markdown"], capture_output=True, text=True, check=True).stdout
    before, rest = README.read_text(encoding="utf-8").split(START)
    README.write_text(before + START + table.strip() + "\n" + END + rest.split(END)[1], encoding="utf-8")
