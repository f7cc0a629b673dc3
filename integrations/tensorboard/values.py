"""Summary values as TensorBoard's protocol buffers, made without TensorFlow."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

PLUGIN = "trainvet"
PREFIX = "trainvet/"
LARGEST = float(np.finfo(np.float32).max)
CONTENT = b'{"v":1}'
_TYPES: dict[np.dtype[Any], int] = {np.dtype("<f4"): types_pb2.DT_FLOAT, np.dtype("<f8"): types_pb2.DT_DOUBLE}
_DTYPES: dict[int, np.dtype[Any]] = {code: dtype for dtype, code in _TYPES.items()}


@functools.cache
def _metadata(plugin: str, content: bytes) -> Any:
    plugin_data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    return summary_pb2.SummaryMetadata(plugin_data=plugin_data, data_class=summary_pb2.DATA_CLASS_TENSOR)


@functools.lru_cache(256)
def _shape(sizes: tuple[int, ...]) -> Any:
    return tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in sizes])


def array(values: np.ndarray[Any, Any]) -> Any:
    """A float32 or float64 tensor of our plugin, little-endian and bit for bit (NaN payloads too)."""
    held = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    tensor = tensor_pb2.TensorProto(dtype=_TYPES[held.dtype], tensor_shape=_shape(held.shape), tensor_content=held.tobytes())
    return summary_pb2.Summary.Value(tensor=tensor, metadata=_metadata(PLUGIN, CONTENT))


def strings(texts: Sequence[str], plugin: str = PLUGIN, content: bytes = CONTENT) -> Any:
    """A string tensor [n] of our plugin."""
    return data([text.encode("utf-8", "replace") for text in texts], plugin, content)


def data(items: Sequence[bytes], plugin: str, content: bytes) -> Any:
    """A tensor [n] of bytes of any plugin."""
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=_shape((len(items),)), string_val=items)
    return summary_pb2.Summary.Value(tensor=tensor, metadata=_metadata(plugin, content))


def markdown(text: str) -> Any:
    """A text for the Text dashboard."""
    return strings([text], plugin="text", content=b"")


def scalar(number: float) -> Any:
    """A number for the Scalars dashboard (float32)."""
    if abs(number) > LARGEST:  # the protocol buffer would refuse it
        number = math.copysign(math.inf, number)
    return summary_pb2.Summary.Value(simple_value=number)


def event(step: int, wall_time: float, values: Mapping[str, Any], known: set[str]) -> bytes:
    """One serialised Event with one value per tag. Metadata goes only with the first value of a tag: ``known`` holds those that had it."""
    message = event_pb2.Event(wall_time=wall_time, step=step)
    for tag, value in values.items():
        item = message.summary.value.add()
        item.CopyFrom(value)
        item.tag = tag
        if tag in known:
            item.ClearField("metadata")
    return bytes(message.SerializeToString())


def version(wall_time: float) -> bytes:
    """The Event that every file begins with."""
    return bytes(event_pb2.Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString())


def session_start(step: int, wall_time: float) -> bytes:
    """The Event that makes TensorBoard drop what older files of this directory hold from ``step`` on."""
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    return bytes(event_pb2.Event(wall_time=wall_time, step=step, session_log=log).SerializeToString())


@functools.lru_cache(4096)
def tag(*parts: str) -> str:
    """A tag below our prefix; what is not a letter, digit or one of ``._-`` in a part becomes ``_``."""
    return PREFIX + "/".join(re.sub(r"[^A-Za-z0-9._-]", "_", part)[:80] or "_" for part in parts)


def read_array(value: Any) -> np.ndarray[Any, Any]:
    """The inverse of :func:`array`. Raises ValueError for another type or a size that does not fit the shape."""
    dtype = _DTYPES.get(value.tensor.dtype)
    sizes = [int(dim.size) for dim in value.tensor.tensor_shape.dim]
    data = value.tensor.tensor_content
    if dtype is None or any(size < 0 for size in sizes):
        raise ValueError(f"{value.tag}: not a float tensor")
    count = 1
    for size in sizes:
        count *= size
    if count * dtype.itemsize != len(data):
        raise ValueError(f"{value.tag}: {len(data)} bytes do not fill the shape {sizes}")
    return np.frombuffer(data, dtype=dtype).reshape(sizes)


def read_strings(value: Any) -> list[str]:
    """The inverse of :func:`strings`."""
    if value.tensor.dtype != types_pb2.DT_STRING:
        raise ValueError(f"{value.tag}: not a string tensor")
    return [item.decode("utf-8", "replace") for item in value.tensor.string_val]
