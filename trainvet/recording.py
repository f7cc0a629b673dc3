"""A run on file: plain forms of facts and snapshots, and a recorded run judged again.

What a rule sees must be reproducible from what was recorded. Tables are recorded as float32, so a callback calls :func:`round_tables`
before the rules judge; series are recorded as float64 and stay as they are.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainvet.environment import plain as without_secrets
from trainvet.finding import Finding
from trainvet.monitor import Monitor
from trainvet.report import Report
from trainvet.statistics import Facts, Layer, Loss, Optimizer, Schedule, Severance, Snapshot, Subject, Table, Vector

CURVE_POINTS = 65_536
LONGEST_CURVE = 100_000_000
Single = np.ndarray[Any, np.dtype[np.float32]]


def single(values: Vector) -> Single:
    """Float64 as float32: finite stays finite (clipped to the largest), non-zero stays non-zero, every NaN becomes the same NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out: Single = np.asarray(values, dtype=np.float64).astype(np.float32)
    limit = np.finfo(np.float32)
    wrong = (np.isinf(out) & np.isfinite(values)) | ((out == 0) & (values != 0))
    if wrong.any():
        out = np.where(wrong, np.copysign(np.where(out == 0, limit.smallest_subnormal, limit.max), out), out).astype(np.float32)
    out[np.isnan(out)] = np.float32(np.nan)
    return out


def round_tables(snapshot: Snapshot) -> Snapshot:
    """The snapshot with its tables rounded to float32 (still float64 vectors); idempotent. What is recorded is then what was judged."""
    if not snapshot.tables:
        return snapshot
    tables = {}
    for target, table in snapshot.tables.items():
        if table.columns:
            matrix = single(np.stack([np.asarray(vector, dtype=np.float64) for vector in table.columns.values()])).astype(np.float64)
            table = Table(table.names, dict(zip(table.columns, matrix, strict=True)))
        tables[target] = table
    return dataclasses.replace(snapshot, tables=tables)


# ---- plain forms


def jsonable(value: Any, depth: int = 12) -> Any:
    """``value`` in strict JSON types: non-finite numbers become "nan", "inf", "-inf", unknown objects their (shortened) text."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, np.generic):
        return jsonable(value.item(), depth) if not isinstance(value.item(), np.generic) else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth and isinstance(value, Mapping):
        return {str(key): jsonable(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item, depth - 1) for item in value]
    try:
        return str(value)[:2000]
    except Exception:  # an object of the user's whose __str__ fails is no reason to lose the record
        return f"<{type(value).__name__}>"


def curve_points(curve: Vector, most: int = CURVE_POINTS) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Vector]:
    """Positions [P] and values [P] that give ``curve`` back under linear interpolation: exactly as long as its non-constant part has at
    most ``most`` points, otherwise with the first, smallest, largest and last value of each of ``most // 4`` stretches."""
    curve = np.asarray(curve, dtype=np.float64)
    inner = np.ones(len(curve), dtype=bool)
    inner[1:-1] = (curve[1:-1] != curve[:-2]) | (curve[1:-1] != curve[2:])
    kept = np.flatnonzero(inner)
    if len(kept) > most:
        edges = np.linspace(0, len(curve), max(most // 4, 1) + 1).astype(np.int64)
        places = [
            start + offset
            for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            if stop > start
            for offset in (0, int(np.argmin(curve[start:stop])), int(np.argmax(curve[start:stop])), stop - start - 1)
        ]
        kept = np.unique(np.array(places, dtype=np.int64))
    return kept, curve[kept]


def _pack_curve(curve: Vector) -> dict[str, Any]:
    places, values = curve_points(curve)
    data = np.concatenate([places.astype("<f8"), values.astype("<f8")]).tobytes()
    return {"length": len(curve), "points": len(places), "zlib": base64.b64encode(zlib.compress(data, 6)).decode("ascii")}


def _unpack_curve(data: Any) -> Vector:
    length, points = (_checked(data, key, int, "a schedule's curve") for key in ("length", "points"))
    if not 0 <= points <= 4 * CURVE_POINTS or not points <= length <= LONGEST_CURVE or (length > 0) != (points > 0):
        raise ValueError(f"a schedule's curve has {points} points for {length} steps")
    if not length:
        return np.empty(0)
    unzip = zlib.decompressobj()
    try:
        raw = unzip.decompress(base64.b64decode(_checked(data, "zlib", str, "a schedule's curve"), validate=True), 16 * points + 1)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"a schedule's curve cannot be read: {error}") from None
    if len(raw) != 16 * points:
        raise ValueError("a schedule's curve is shorter or longer than it says")
    places, values = np.frombuffer(raw, dtype="<f8").reshape(2, points)
    return values.copy() if points == length else np.interp(np.arange(length), places, values)


_NESTED: dict[str, type] = {
    "subjects": Subject,
    "optimizers": Optimizer,
    "schedules": Schedule,
    "losses": Loss,
    "layers": Layer,
    "severed": Severance,
}
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (float, int), "None": (type(None),)}


def facts_to_dict(facts: Any) -> dict[str, Any]:
    """Facts (and what they hold) in JSON types; fields at their defaults are left out, secrets among the hyper-parameters struck out."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        if field.name in _NESTED:
            plain[field.name] = [facts_to_dict(item) for item in value]
        elif field.name == "curve":
            plain["curve"] = _pack_curve(value)
        elif field.name == "hyper_parameters":
            plain[field.name] = without_secrets(value)
        elif field.default is dataclasses.MISSING or value != field.default:
            plain[field.name] = jsonable(value)
    return plain


def facts_from_dict(data: Any, kind: type = Facts) -> Any:
    """The inverse of :func:`facts_to_dict`. Unknown fields are ignored; a wrong type raises ValueError, nothing is executed."""
    what = kind.__name__.lower()
    if not isinstance(data, Mapping):
        raise ValueError(f"{what}: expected an object, found {type(data).__name__}")
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name not in data:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ValueError(f"{what}: {field.name} is missing")
            continue
        value = data[field.name]
        if field.name in _NESTED:
            given[field.name] = tuple(facts_from_dict(item, _NESTED[field.name]) for item in _checked(data, field.name, list, what))
        elif field.name == "curve":
            given["curve"] = _unpack_curve(value)
        else:
            given[field.name] = _read(value, str(field.type), f"{what}: {field.name}")
    return kind(**given)


def _read(value: Any, annotation: str, what: str) -> Any:
    if annotation.startswith("tuple["):
        if not isinstance(value, list):
            raise ValueError(f"{what} must be a list, not {type(value).__name__}")
        inner = annotation[len("tuple[") :].split(",")[0]
        return tuple(_read(item, inner, what) for item in value)
    if annotation.startswith("Mapping["):
        inner = annotation.rsplit(",", 1)[1].strip(" ]")
        if not isinstance(value, dict) or (inner == "str" and not all(isinstance(item, str) for item in value.values())):
            raise ValueError(f"{what} must be an object")
        return value
    if annotation == "float" and value in ("nan", "inf", "-inf"):
        return float(value)
    allowed = tuple(kind for part in annotation.split("|") for kind in _PLAIN.get(part.strip(), ()))
    if "float" in annotation and value in ("nan", "inf", "-inf"):
        return float(value)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ValueError(f"{what} must be of type {annotation}, not {type(value).__name__}")
    return float(value) if "float" in annotation and isinstance(value, int) else value


def _checked(data: Any, key: str, kind: type, what: str) -> Any:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what}: {key} must be of type {kind.__name__}")
    return value


def printable(text: Any, most: int = 2000) -> str:
    """Untrusted text on one line: control, bidirectional and other invisible characters become a visible mark, so that a name cannot move
    the cursor, colour a terminal or break a table. Shortened to ``most`` characters."""
    line = str(text)
    line = line if len(line) <= most else line[: most - 1] + "…"
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else " " if char.isspace() else "\N{REPLACEMENT CHARACTER}" for char in line)


# ---- a recorded run


@dataclasses.dataclass(frozen=True)
class Recording:
    """What was read back of one run. ``moments`` holds, in the order of the run, (step, Facts) and Snapshot; ``findings`` what was told
    then; ``end`` the report at the end, None for a run that was killed or still goes on; ``start`` the step it began or resumed at.

    ``thinned`` counts sampled snapshots whose tables were left out to keep the files small, ``dropped`` snapshots that were lost;
    ``notes`` say what else is incomplete.
    """

    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moments: tuple[tuple[int, Facts] | Snapshot, ...] = ()
    findings: tuple[Finding, ...] = ()
    end: Report | None = None
    start: int = 0
    thinned: int = 0
    dropped: int = 0
    notes: tuple[str, ...] = ()

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The snapshots alone."""
        return tuple(moment for moment in self.moments if isinstance(moment, Snapshot))

    @property
    def facts(self) -> Facts:
        """The latest plan; empty where none was recorded."""
        return next((moment[1] for moment in reversed(self.moments) if not isinstance(moment, Snapshot)), Facts())


def replay(recording: Recording, monitor: Monitor, each: Callable[[Snapshot], None] | None = None) -> Report:
    """Let a fresh ``monitor`` judge a recorded run again; ``each`` is called after every snapshot. The report has the recorded status:
    it ends as the run ended, and a run without an end stays "running"."""
    for moment in recording.moments:
        if isinstance(moment, Snapshot):
            monitor.observe(moment)
            if each is not None:
                each(moment)
        else:
            monitor.begin(moment[1], moment[0])
    if recording.end is not None:
        return monitor.end(recording.end.status, recording.end.reason)
    return monitor.report
