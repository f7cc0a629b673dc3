"""Text files are in order: ``python tests/text_files.py FILE …``. TOML, YAML and JSON can be read; lines end plainly; one line break at the end."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import yaml

READERS = {".toml": tomllib.loads, ".json": json.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}


def complaint(path: Path) -> str:
    """What is wrong with a file; empty where nothing is."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 ({error.reason} at byte {error.start})"
    try:
        READERS.get(path.suffix, str)(text)
    except (ValueError, yaml.YAMLError) as error:
        return f"cannot be read: {error}"
    if "\r" in text:
        return "has carriage returns"
    if text and (not text.endswith("\n") or text.endswith("\n\n")):
        return "must end with exactly one line break"
    trailing = [number for number, line in enumerate(text.split("\n"), 1) if line != line.rstrip()]
    return f"has spaces at the end of line {trailing[0]}" if trailing else ""


if __name__ == "__main__":
    found = {name: said for name in sys.argv[1:] if not Path(name).is_symlink() and (said := complaint(Path(name)))}
    for name, said in found.items():
        print(f"{name} {said}")
    sys.exit(bool(found))
