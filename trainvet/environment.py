"""What a run was made with: versions, platform, commit, command line and hyper-parameters. Secrets are struck out, the host is not named."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

PACKAGES = ("torch", "lightning", "pytorch_lightning", "keras", "tensorflow", "jax", "numpy", "tensorboard", "transformers", "accelerate")
STRUCK = "***"
WORD = r"token|key|passw|passphrase|pwd|secret|credential|auth|bearer"
SECRET = re.compile(WORD, re.IGNORECASE)
STRONG = re.compile(r"passw|passphrase|pwd|secret|credential", re.IGNORECASE)
# words that hold one of the above and are no secrets
HARMLESS = re.compile(r"tokeni[sz]|keypoint|keyword|keyframe|keyboard|monkey|author(?!i[sz])", re.IGNORECASE)
ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
INSIDE = re.compile(rf"""((?:{WORD})[\w.\-]*["']?\s*[=:]\s*(?:bearer\s+)?)("[^"]*"|'[^']*'|[^\s&;,}}\]]+)""", re.IGNORECASE)
OPTION = re.compile(r"--?[A-Za-z][\w.\-]*(=|$)")
GIT_SECONDS = 2.0
MOST_ITEMS, LONGEST_TEXT, DEEPEST = 1000, 2000, 6


def describe(hyper_parameters: Mapping[str, Any] | None = None, seed: Any = None) -> dict[str, Any]:
    """The environment as plain JSON types.

    Only packages that the program has loaded already are named; none is imported. ``hyper_parameters`` and ``seed`` (a number, or a
    mapping of what is known about seeding) are made plain by :func:`plain`. ``hash`` is equal for equal environments. Never raises.
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
        "seed": plain(seed),
    }
    found["hash"] = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    return found


def git_state() -> dict[str, Any]:
    """The working directory's commit and whether tracked files differ from it (None: not known in time); empty outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def strike_out(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets.

    Struck out are the values of options and KEY=VALUE pairs whose name holds token, key, password, secret and the like, in the argument
    itself or the next one, the same inside an argument (a query, JSON), and credentials in addresses. The home directory becomes "~".
    """
    shown, hide = [], False
    for argument in map(str, arguments):
        name, equals, _ = argument.partition("=")
        if hide and not OPTION.match(argument):
            shown.append(STRUCK)
        elif equals and re.fullmatch(r"[\w.\-+/@]+", name) and _secret(name):
            shown.append(f"{name}={STRUCK}")
        else:
            shown.append(strike_text(argument))
        hide = bool(OPTION.match(argument)) and not equals and _secret(argument)
    return shown


def strike_text(text: str) -> str:
    """A text without credentials in addresses, values behind names that look like secrets, and the home directory; cut at LONGEST_TEXT."""
    text = ADDRESS.sub(f"{STRUCK}@", text[:LONGEST_TEXT])
    text = INSIDE.sub(lambda found: found[0] if HARMLESS.match(found[1]) else f"{found[1]}{STRUCK}", text)
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def plain(value: Any, secret: str = "", depth: int = 0) -> Any:
    """A JSON-safe copy in which what lies under a key that looks like a secret is struck out.

    ``secret`` is "", "text" (strings are struck out; a number under "key_dim" or "max_token" is a size) or "all". Numbers, strings, None,
    mappings, sequences, sets (sorted), dataclasses, namespaces, paths, enums and small numpy arrays keep their content; of anything else
    only the type is named, since its text may be huge, wait for a device, or hold an address in memory.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value, secret, depth)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size <= 64):
        return plain(value.tolist(), secret, depth)
    if isinstance(value, int | float):
        number = int(value) if isinstance(value, int) else float(value)
        return STRUCK if secret == "all" else number if isinstance(number, int) or np.isfinite(number) else str(number)
    if isinstance(value, str | os.PathLike):
        return STRUCK if secret else strike_text(str(value))
    if depth >= DEEPEST:
        return _type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    try:
        return _container(value, secret, depth)
    except Exception:  # a mapping of somebody else's that cannot be read
        return _type(value)


def _container(value: Any, secret: str, depth: int) -> Any:
    if isinstance(value, Mapping):
        items = list(value.items())
        shown = {str(key): plain(item, secret or _kind(str(key)), depth + 1) for key, item in items[:MOST_ITEMS]}
        return shown | ({"…": f"{len(items) - MOST_ITEMS} more"} if len(items) > MOST_ITEMS else {})
    if isinstance(value, list | tuple | set | frozenset):
        members = [plain(item, secret, depth + 1) for item in list(value)[:MOST_ITEMS]]
        return sorted(members, key=repr) if isinstance(value, set | frozenset) else members
    return _type(value)


def _type(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _secret(name: str) -> bool:
    return bool(SECRET.search(HARMLESS.sub("", name)))


def _kind(name: str) -> str:
    if STRONG.search(name):
        return "all"
    return "text" if _secret(name) else ""


def _version(name: str) -> str:
    """The version of the loaded module, which may not be the one that is installed by now."""
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(loaded, str):
        return str(loaded)
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _git(*arguments: str) -> str | None:
    """Git's answer; None where there is none in time. Nothing is written (no locks) and no program that the checkout names is run."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_SECONDS, check=False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
