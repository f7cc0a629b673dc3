"""One eager forward on TensorFlow with given values in the variables' places. Eager kernels do not hide NaN as fused ones do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainvet.integrations.keras.backend import Ran
from trainvet.integrations.keras.plan import Place, Plan
from trainvet.integrations.keras.shadow import Shadows


def replay(plan: Plan, batch: Any, values: Mapping[str, Any]) -> list[Ran]:
    """The leaf layers in the order of their calls.

    The model is called statelessly: its variables are looked up among the values, and what it assigns (running statistics, seeds) is thrown away.
    """
    model = plan.model
    found: list[Ran] = []
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    training = {"training": True} if getattr(model, "_call_has_training_arg", True) else {}
    with Shadows() as shadows:
        for place in plan.places:
            if place.leaf and place.name:
                shadows.put(place.layer, "call", _watched(place, place.layer.call, found))
        model.stateless_call(_values(model.trainable_variables, values), _values(model.non_trainable_variables, values), x, **training)
    return found


def _watched(place: Place, call: Callable[..., Any], found: list[Ran]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        fed = _floats((args, kwargs))
        weights = _floats([variable.value for variable in place.layer.weights])
        output = call(*args, **kwargs)
        if not tf.executing_eagerly():
            return output
        clean = _clean(fed)
        low = min([float(tf.reduce_min(tensor)) for tensor in fed if clean and int(tf.size(tensor))], default=math.nan)
        high = max([float(tf.reduce_max(tensor)) for tensor in fed if clean and int(tf.size(tensor))], default=math.nan)
        found.append(Ran(place.name, type(place.layer).__name__, clean, _clean(weights), _clean(_floats(output)), low, high))
        return output

    return watched


def _floats(value: Any) -> list[Any]:
    return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(value) if isinstance(leaf, tf.Tensor | tf.Variable) and leaf.dtype.is_floating]


def _clean(tensors: list[Any]) -> bool:
    return not any(bool(tf.reduce_any(tf.math.is_nan(tensor) | tf.equal(tensor, float("inf")))) for tensor in tensors)


def _values(variables: list[Any], values: Mapping[str, Any]) -> list[Any]:
    return [values.get(str(id(variable)), variable.value) for variable in variables]
