"""Measured and guarded training steps on TensorFlow, built from the user's own ``train_step`` with Keras' own ``make_train_function``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from trainvet.integrations.keras import kernels
from trainvet.integrations.keras.backend import Outcome, Ran, UnmeasurableError
from trainvet.integrations.keras.facts import Traits
from trainvet.integrations.keras.layout import Layout
from trainvet.integrations.keras.look import Look
from trainvet.integrations.keras.plan import Plan
from trainvet.integrations.keras.reduction import Reduction
from trainvet.integrations.keras.shadow import Shadows

EXTRA = "trainvet"
# they keep their state in the graph: a second graph would draw its own numbers, beginning with the first
STATEFUL_RANDOM = frozenset({
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "ParameterizedTruncatedNormal", "RandomShuffle", "RandomGamma",
    "RandomPoisson", "RandomPoissonV2", "Multinomial", "RandomCrop",
})  # fmt: skip


class TensorFlow:
    """Keras on TensorFlow, on one replica: graph mode, XLA, eager, any ``steps_per_execution``."""

    name = "tensorflow"

    def refusal(self, model: Any) -> str:
        """Several replicas are not measured."""
        replicas = int(model.distribute_strategy.num_replicas_in_sync)
        if replicas > 1 or not isinstance(model.distribute_strategy, type(tf.distribute.get_strategy())):
            return f"not supported yet with {type(model.distribute_strategy).__name__} ({replicas} replicas): nothing is observed"
        return ""

    def measured(self, plan: Plan, optimizers: Mapping[str, Any], want: frozenset[str], guard: bool, keep: bool) -> MeasuredStep:
        """See :class:`Backend`."""
        return MeasuredStep(plan, optimizers, want, guard, keep)

    def single(self, function: Callable[[Any], Any], iterator: Any) -> Callable[[Any], Any]:
        """Traced for the iterator's shapes, so that the user's step is not traced again."""
        spec = getattr(iterator, "element_spec", None)
        if spec is None:
            return lambda batch: function(iter([batch]))
        return tf.function(lambda batch: function(iter([batch])), input_signature=[spec], autograph=False)

    def replay(self, plan: Plan, batch: Any, values: Mapping[str, Any]) -> list[Ran]:
        """See :class:`Backend`; ``stateless_call`` computes with the values and writes to none of the model's variables."""
        from trainvet.integrations.keras.replay import replay

        return replay(plan, batch, values)


class MeasuredStep:
    """The user's training step with ours around it, compiled the way the user's is.

    ``traits`` is what tracing it taught about the model.
    """

    def __init__(self, plan: Plan, optimizers: Mapping[str, Any], want: frozenset[str], guard: bool, keep: bool) -> None:
        self.plan = plan
        self.optimizers = optimizers
        self.want = want
        self.guard = guard
        self.keep = keep
        self.errors: list[str] = []
        self.traits = Traits()
        self._layout = Layout()
        self._user_step = plan.model.train_step
        self._function = build(plan.model, self._train_step)
        self._traced: Callable[[Any], Any] | None = None

    def prepare(self, iterator: Any) -> None:
        """Trace for the iterator's element spec (its batch size is unknown, as in the user's function), so that one trace serves all batches."""
        spec = getattr(iterator, "element_spec", None)
        if self.plan.model.run_eagerly or spec is None:
            self._traced = lambda batch: self._function(iter([batch]))
        elif self._traced is None:
            traced = tf.function(lambda batch: self._function(iter([batch])), input_signature=[spec], autograph=False)
            traced.get_concrete_function()
            self._traced = traced

    def __call__(self, batch: Any) -> tuple[dict[str, Any], Outcome]:
        """Train on ``batch``."""
        assert self._traced is not None
        logs = dict(self._traced(batch))
        extra = logs.pop(EXTRA)
        vector = extra["vector"].numpy().astype(np.float64)
        held = bool(extra["held"].numpy()) if "held" in extra else False
        return logs, Outcome(self._layout, vector, held, extra.get("before", {}), extra["outputs"])

    # ---- inside the step

    def _train_step(self, data: Any) -> Any:
        look = Look(self.plan, self.optimizers, self.want, self.keep, data)
        guard = Guard(self.plan) if self.guard else None
        extra: dict[str, Any] = {}
        if self.keep:
            state = self.plan.model.non_trainable_variables if self.plan.built else []
            extra["before"] = {str(id(variable)): tf.identity(variable.value) for variable in state}
        with Shadows() as shadows:
            if guard is not None:
                for optimizer in self.optimizers.values():
                    shadows.put(optimizer, "apply", guard.around(optimizer))
            look.shadow(shadows)
            logs = self._user_step(data)
        if not isinstance(logs, dict):
            raise UnmeasurableError(f"train_step returns {type(logs).__name__}, not a dictionary")
        if guard is not None:
            guard.restore()
            extra["held"] = tf.logical_not(guard.ok)
        if self.keep:
            extra["before"] |= look.kept
        reduction = Reduction(look)
        extra["vector"] = reduction.pack(data)
        extra["outputs"] = reduction.outputs
        self._layout = reduction.layout.seal()
        self.errors += look.errors
        self.traits = dataclasses.replace(look.traits(), subjects=reduction.layout.subjects)
        if not tf.executing_eagerly():
            refuse_stateful_random(tf.compat.v1.get_default_graph())
        return {**logs, EXTRA: extra}


class Guard:
    """Holds an update whose gradients are not finite, and puts the floating non-trainable state (running statistics) back.

    With a dynamic loss scale the optimizer skips by itself (and lowers its scale, which must not be undone): only the state is put back.
    """

    def __init__(self, plan: Plan) -> None:
        self.ok: Any = tf.constant(True)
        self._state = [(variable, tf.identity(variable.value)) for variable in plan.buffers.values()]

    def around(self, optimizer: Any) -> Callable[..., Any]:
        """``optimizer.apply`` behind the check."""
        apply = optimizer.apply

        def guarded(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = list(trainable_variables if trainable_variables is not None else optimizer._trainable_variables)
            kernels.build_optimizer(optimizer, variables)
            self.ok = tf.logical_and(self.ok, all_finite(grads))
            if getattr(optimizer, "inner_optimizer", None) is not None:
                return apply(grads, variables)
            if tf.executing_eagerly():
                return apply(grads, variables) if bool(self.ok) else None

            def update() -> Any:
                apply(grads, variables)
                return tf.constant(0)

            tf.cond(self.ok, update, lambda: tf.constant(0))
            return None

        return guarded

    def restore(self) -> None:
        """Back to the state from before the forward, where the step was not finite."""
        for variable, before in self._state:
            variable.assign(tf.where(self.ok, variable.value, before))


def build(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A train function made by Keras for ``step``; the model's own step and function are back in place afterwards."""
    attributes = model.__dict__
    own = attributes.get("train_function")
    with Shadows() as shadows:
        shadows.put(model, "train_step", step)
        try:
            model.make_train_function(force=True)
            return attributes["train_function"]
        finally:
            attributes["train_function"] = own


def all_finite(grads: list[Any]) -> Any:
    """Are all elements finite? One sum of squares per gradient, every element only where that sum is not finite (it may have overflowed)."""
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in grads if gradient is not None]
    if not values:
        return tf.constant(True)
    total = tf.add_n([tf.nn.l2_loss(kernels.wide(value)) for value in values])
    return tf.cond(
        tf.math.is_finite(total),
        lambda: tf.constant(True),
        lambda: tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(kernels.wide(value))) for value in values])),
    )


def refuse_stateful_random(graph: Any) -> None:
    """Raise UnmeasurableError where the step draws from a seeded stateful random operation: measured steps would draw from another one."""
    definition = graph.as_graph_def(add_shapes=False)
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    for node in nodes:
        if node.op in STATEFUL_RANDOM and (node.attr["seed"].i or node.attr["seed2"].i):
            raise UnmeasurableError(
                f"the step draws random numbers with TensorFlow's {node.op}, which keeps its state in the graph: measuring would change them "
                "(keras.random with a SeedGenerator does not have this problem)"
            )
