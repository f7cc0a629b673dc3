"""The layers of one traced forward: what kind they are, and which layer's output each is given; shared modules and broken ties."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from trainvet.integrations.torch.activations import MODULES, WITH_KWARGS
from trainvet.integrations.torch.losses import tensors_in
from trainvet.integrations.torch.modules import BATCH_NORM, DROPOUT, own_parameters, reported, title
from trainvet.integrations.torch.plan import is_embedding, is_norm
from trainvet.statistics import Layer

# autograd nodes (without "Backward" and the number) that change the form and not one element
RESHAPING = frozenset({
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute", "Clone", "ToCopy", "Alias", "AsStrided",
})  # fmt: skip
TRANSPARENT = (nn.Identity, nn.Flatten, nn.Unflatten)
DEEP = 16  # nodes to follow at most
SEVERAL = 64  # elements whose spread tells a distribution
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# module type -> the attributes that hold its widths
WIDTHS: tuple[tuple[tuple[type[nn.Module], ...], str, str], ...] = (
    ((nn.Linear,), "in_features", "out_features"),
    ((nn.Bilinear,), "in1_features", "out_features"),
    ((nn.modules.conv._ConvNd,), "in_channels", "out_channels"),
    (RECURRENT, "input_size", "hidden_size"),
    ((nn.MultiheadAttention,), "embed_dim", "embed_dim"),
    ((nn.Embedding, nn.EmbeddingBag), "num_embeddings", "embedding_dim"),
    ((nn.modules.batchnorm._NormBase,), "num_features", "num_features"),
    ((nn.GroupNorm,), "num_channels", "num_channels"),
)


class Wiring:
    """Watches one forward: which layer made what each layer is given. It stands on hooks of its own, and holds autograd nodes until ``stop``."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        """``paths``: module id -> dotted path."""
        self.paths = paths
        self.after: dict[int, tuple[str, ...] | None] = {}
        self.called: dict[int, int] = {}
        self.error: Exception | None = None
        self._made: dict[int, tuple[Any, str]] = {}
        self._given: dict[int, list[tuple[str, ...] | None]] = {}
        self._handles: list[Any] = []

    def start(self) -> None:
        """The forward begins."""
        self._handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after, with_kwargs=True)]

    def stop(self) -> None:
        """The forward is over; nothing of ours stands and no node is held."""
        for handle in self._handles:
            handle.remove()
            WITH_KWARGS.pop(handle.id, None)
        self._handles = []
        self._made, self._given = {}, {}

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) not in self.paths or not is_layer(module) or torch._C._current_graph_task_id() != -1:
            return
        try:  # before the call: an activation in place overwrites what it is given
            self._given.setdefault(id(module), []).append(self._producers(args))
        except Exception as error:
            self._give_up(error)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        path = self.paths.get(id(module))
        if path is None or torch._C._current_graph_task_id() != -1:
            return
        try:
            self.called[id(module)] = self.called.get(id(module), 0) + 1
            if is_layer(module):
                self._returned(module, title(path, module), kwargs, output)
        except Exception as error:
            self._give_up(error)

    def _returned(self, module: nn.Module, name: str, kwargs: dict[str, Any], output: Any) -> None:
        waiting = self._given.get(id(module))
        given = waiting.pop() if waiting else None
        more = self._producers(kwargs) if kwargs else ()
        found = None if given is None or more is None else tuple(dict.fromkeys((*given, *more)))
        if id(module) in self.after:
            known = self.after[id(module)]
            found = None if known is None or found is None else tuple(dict.fromkeys((*known, *found)))
        self.after[id(module)] = found
        if isinstance(module, TRANSPARENT):
            return
        composite = next(module.children(), None) is not None
        for _, tensor in tensors_in(output):
            node = tensor.grad_fn
            if node is not None and not (composite and id(node) in self._made):
                self._made[id(node)] = node, name

    def _producers(self, given: Any) -> tuple[str, ...] | None:
        """The layers that made the floating tensors in ``given``; None where that is not known of one of them."""
        found: list[str] = []
        for _, tensor in tensors_in(given):
            if not tensor.is_floating_point():
                continue
            maker = self._maker(tensor)
            if not maker:
                return None
            found.append(maker)
        return tuple(dict.fromkeys(found))

    def _maker(self, tensor: Tensor) -> str:
        node = tensor.grad_fn
        for _ in range(DEEP):
            if node is None:
                return ""
            if id(node) in self._made:
                return self._made[id(node)][1]
            if type(node).__name__.rstrip("0123456789").removesuffix("Backward") not in RESHAPING:
                return ""
            node = node.next_functions[0][0]
        return ""

    def _give_up(self, error: Exception) -> None:
        self.error = error
        self.stop()


def is_layer(module: nn.Module) -> bool:
    """A module without parts, or one that owns parameters besides its parts."""
    return next(module.children(), None) is None or reported(module)


def describe_layers(root: nn.Module, wiring: Wiring, depth: Mapping[str, int]) -> tuple[Layer, ...]:
    """Every layer that was called, and those with parameters that were not, in the order of the forward."""
    found = []
    for path, module in root.named_modules():
        if is_layer(module) and (id(module) in wiring.called or own_parameters(module)):
            place = depth.get(path, -1) if id(module) in wiring.called else -1
            found.append(_layer(path, module, place, wiring.after.get(id(module)) or ()))
    return tuple(sorted(found, key=lambda layer: layer.depth if layer.depth >= 0 else len(depth) + 1_000_000))


def _layer(path: str, module: nn.Module, depth: int, after: tuple[str, ...]) -> Layer:
    own = own_parameters(module)
    width_in, width_out = _widths(module)
    rate = getattr(module, "p", 0.0) if isinstance(module, DROPOUT) else getattr(module, "dropout", 0.0)
    keeps = 1.0 - module.momentum if isinstance(module, BATCH_NORM) and module.momentum is not None else 0.0
    kind, function = _kind(module)
    depthwise = kind == "convolution" and 1 < module.groups == module.in_channels
    return Layer(
        title(path, module),
        ("Depthwise" if depthwise else "") + type(module).__name__,  # as Keras calls it
        kind,
        function,
        depth,
        any(name.startswith("bias") or name == "in_proj_bias" for name, parameter in module._parameters.items() if parameter is not None),
        width_in,
        width_out,
        float(rate) if isinstance(rate, int | float) else 0.0,
        keeps,
        bool(own),
        any(parameter.requires_grad for parameter in own),
        after,
    )


def _kind(module: nn.Module) -> tuple[str, str]:
    """The kind of a layer and the activation it applies."""
    if isinstance(module, nn.Linear | nn.Bilinear):
        return "linear", ""
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution", ""
    if isinstance(module, RECURRENT):
        return "recurrent", ""
    if isinstance(module, nn.MultiheadAttention):
        return "attention", ""
    if is_embedding(module):
        return "embedding", ""
    if isinstance(module, BATCH_NORM):
        return "batch_norm", ""
    if is_norm(module):
        return "norm", ""
    if isinstance(module, DROPOUT):
        return "dropout", ""
    origin = type(module).__module__
    if type(module) in MODULES or origin == "torch.nn.modules.activation":
        return "activation", MODULES.get(type(module)) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(module).__name__).lower()
    return ("pooling" if origin == "torch.nn.modules.pooling" else "other"), ""


def _widths(module: nn.Module) -> tuple[int, int]:
    for kinds, width_in, width_out in WIDTHS:
        if isinstance(module, kinds):
            into, out = getattr(module, width_in), getattr(module, width_out)
            if isinstance(module, nn.RNNBase):
                out = (module.proj_size or out) * (2 if module.bidirectional else 1)
            return int(into or 0), int(out or 0)
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, Sequence) and shape and isinstance(module, nn.Module):
        return int(shape[-1]), int(shape[-1])
    return 0, 0


def shared_modules(root: nn.Module, called: Mapping[int, int]) -> tuple[str, ...]:
    """Modules with parameters that hang in several places and ran more than once in one forward, "a = b"; of a shared part only the whole.

    A second reference alone is no sharing: a loss that holds the model, a wrapper and what it wraps.
    """
    places: dict[int, list[str]] = {}
    for path, parent in root.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(id(child), []).append(f"{path}.{name}" if path else name)
    modules = {id(module): module for module in root.modules()}
    found = []
    for key, paths in places.items():
        if len(paths) < 2 or next(modules[key].parameters(), None) is None:
            continue
        if any(called.get(id(part), 0) > 1 for part in modules[key].modules() if own_parameters(part)):
            found.append(" = ".join(paths))
    return tuple(found)


def broken_ties(root: nn.Module) -> tuple[str, ...]:
    """Ties that a model declares in the way of transformers (``_tied_weights_keys``) and that do not hold: the two lie in different memory."""
    found = []
    for path, module in root.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        if not keys or getattr(getattr(module, "config", None), "tie_word_embeddings", False) is not True:
            continue
        for target, source in _ties(module, keys):
            one, other = _parameter(module, target), _parameter(module, source)
            if one is None or other is None or one.shape != other.shape or one is other or one.data_ptr() == other.data_ptr():
                continue
            prefix = f"{path}." if path else ""
            found.append(f"{prefix}{target} = {prefix}{source}")
    return tuple(found)


def _ties(module: nn.Module, keys: Any) -> Iterator[tuple[str, str]]:
    if isinstance(keys, Mapping):
        yield from ((str(target), str(source)) for target, source in keys.items())
        return
    embeddings = getattr(module, "get_input_embeddings", lambda: None)()
    weight = getattr(embeddings, "weight", None)
    source = next((name for name, parameter in module.named_parameters() if parameter is weight), "")
    head = getattr(module, "get_output_embeddings", lambda: None)()
    target = next((name for name, parameter in module.named_parameters() if parameter is getattr(head, "weight", None)), "")
    if source and target in keys:
        yield target, source


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    try:
        parameter = module.get_parameter(name)
    except AttributeError:  # a pattern, or a part that this model lacks
        return None
    return None if is_lazy(parameter) or parameter.device.type == "meta" else parameter


def initial(root: nn.Module) -> tuple[str, ...]:
    """Frozen linear and convolution layers whose weights are those PyTorch builds them with: uniform in ±1/√fan-in, which a trained layer leaves."""
    found = []
    for path, module in root.named_modules():
        if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or is_lazy(module.weight) or module.weight.requires_grad:
            continue
        weight = module.weight.detach()
        if weight.device.type == "meta" or weight.numel() < SEVERAL:
            continue
        bound = nn.init._calculate_fan_in_and_fan_out(weight)[0] ** -0.5
        inside = float(weight.abs().max()) <= bound * (1 + 1e-3)
        if inside and abs(float(weight.float().std()) / (bound / 3**0.5) - 1) < 4 / weight.numel() ** 0.5:
            found.append(path)
    return tuple(found)


def pretrained(root: nn.Module) -> bool:
    """Is it certain that weights were loaded or trained before? Batches were counted, or no bias that starts at 0 is 0 any more.

    Such biases are those of normalisations and attention; a constant in one of them, or fewer than two, proves nothing.
    """
    biases: list[Tensor] = []
    for module in root.modules():
        if isinstance(module, BATCH_NORM) and module.num_batches_tracked is not None and int(module.num_batches_tracked):
            return True
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_bias is not None:
            biases.append(module.in_proj_bias)
        elif is_norm(module) and isinstance(bias := getattr(module, "bias", None), Tensor):
            biases.append(bias)
    biases = [bias.detach() for bias in biases if not is_lazy(bias) and bias.device.type != "meta" and bias.numel() > 1]
    return len(biases) > 1 and all(bool((bias != bias.flatten()[0]).any()) for bias in biases)
