"""Reading a tensor of the user's graph without changing how TensorFlow optimises that graph.

The graph optimiser regroups a tree of multiplications or additions (``(a * b) * c`` becomes ``(a * c) * b`` where that saves broadcasts), but only
while each inner result has one reader. It also fuses matrix product, bias and activation while nobody else reads what lies between. A second reader,
ours, would switch that off in the measured step: the numbers would still be right, and differ in the last bit. So an inner product is computed a
second time for us, and an output that is about to be fused is not read.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

PRODUCTS = ("Mul",)
SUMS = ("Add", "AddV2", "AddN")
MATRIX = ("MatMul", "BatchMatMulV2", "Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Einsum", "BiasAdd")
ACTIVATIONS = ("Relu", "Relu6", "LeakyRelu", "Elu", "Tanh", "Sigmoid", "Selu", "Softplus")
COPIES = ("Identity", "IdentityN")
MARK = "_trainvet"
DEPTH = 20


def tap(tensor: Any) -> Any:
    """The tensor itself where a second reader does no harm, else a second computation of it. To be called when the user's step is fully traced."""
    if tf.executing_eagerly() or not isinstance(tensor, tf.Tensor):
        return tensor
    family = _family(tensor.op.type)
    return _again(tensor, family, 0) if any(kind in family for kind in _readers(tensor)) else tensor


def fused(tensor: Any) -> bool:
    """Is this the sum in front of an activation (or of another sum) that is its only reader?"""
    if tf.executing_eagerly() or tensor.op.type not in (*SUMS, *MATRIX):
        return False
    readers = _readers(tensor)
    return len(readers) == 1 and (readers[0] in ACTIVATIONS or (tensor.op.type in SUMS and readers[0] in SUMS))


def _readers(tensor: Any) -> list[str]:
    """The kinds of operations that read a tensor, seen through copies, which the optimiser removes."""
    found = []
    for operation in tensor.consumers():
        if operation.type in COPIES:
            places = [index for index, source in enumerate(operation.inputs) if source is tensor or source.name == tensor.name]
            found += [kind for index in places for kind in _readers(operation.outputs[index])]
        else:
            found.append(operation.type)
    return found


def _family(kind: str) -> tuple[str, ...]:
    return next((family for family in (PRODUCTS, SUMS) if kind in family), ())


def _again(tensor: Any, family: tuple[str, ...], depth: int) -> Any:
    """A copy of the tree of one kind of operation that ends in ``tensor``; the mark keeps it from being merged with the original."""
    operation = tensor.op
    while operation.type in COPIES:
        tensor = operation.inputs[tensor.value_index]
        operation = tensor.op
    if operation.type not in family or depth > DEPTH:
        return tensor
    inputs = [_again(source, family, depth + 1) for source in operation.inputs]
    make = getattr(tf.raw_ops, operation.type)
    copy = make(inputs=inputs) if operation.type == "AddN" else make(x=inputs[0], y=inputs[1])
    copy.op._set_attr(MARK, attr_value_pb2.AttrValue(b=True))
    return copy
