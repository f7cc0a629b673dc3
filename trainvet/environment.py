"""What a run was made with: versions, platform, commit, command line and hyper-parameters; secrets are struck out."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "lightning", "pytorch_lightning", "keras", "tensorflow", "jax", "numpy", "tensorboard")
SECRET = re.compile(r"token|key|passw|secret|credential|auth", re.IGNORECASE)
STRUCK = "***"


def describe(hyper_parameters: Mapping[str, Any] | None = None, seed: int | None = None) -> dict[str, Any]:
    """The environment as plain JSON types. Only packages that the program has loaded already are named; none is imported.

    ``hash`` is stable over equal environments.
    """
    import trainvet

    found: dict[str, Any] = {
        "trainvet": trainvet.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES if name in sys.modules},
        "git": git_state(),
        "command": strike_out(sys.argv),
        "hyper_parameters": plain(hyper_parameters or {}),
        "seed": seed,
    }
    found["hash"] = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    return found


def git_state() -> dict[str, Any]:
    """Commit and whether tracked files differ from it; empty outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))} if commit else {}


def strike_out(arguments: Sequence[str]) -> list[str]:
    """A command line without the values of arguments that look like secrets, and without credentials in addresses."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide and not argument.startswith("-"):
            shown.append(STRUCK)
        elif equals and SECRET.search(name):
            shown.append(f"{name}={STRUCK}")
        else:
            shown.append(re.sub(r"(\w+://)[^/@\s]+@", rf"\1{STRUCK}@", argument))
        hide = argument.startswith("-") and not equals and bool(SECRET.search(argument))
    return shown


def plain(value: Any, name: str = "", depth: int = 0) -> Any:
    """A JSON-safe copy: other types become their type's name or text, values whose key looks like a secret are struck out."""
    if SECRET.search(name) and isinstance(value, str):
        return STRUCK
    if isinstance(value, Mapping) and depth < 6:
        return {str(key): plain(item, str(key), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth < 6:
        return [plain(item, name, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "unknown"))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
