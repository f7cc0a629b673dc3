"""What one forward hands to loss functions and embeddings: seen before the call, which may raise, and reduced at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainvet.integrations.torch.by_hand import OPERATIONS, ByHand
from trainvet.integrations.torch.losses import Call, read_call
from trainvet.integrations.torch.moments import smaller, usable
from trainvet.integrations.torch.origins import origin_of
from trainvet.integrations.torch.outputs import measure

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
PRODUCTS = frozenset({torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__})
# tensors that a step makes by itself: targets made of them (a GAN's "real" and "fake") are no labels of the data
FACTORIES = frozenset({
    torch.ones, torch.zeros, torch.full, torch.ones_like, torch.zeros_like, torch.full_like, Tensor.new_ones, Tensor.new_zeros, Tensor.new_full,
    Tensor.fill_, torch.rand, torch.rand_like, torch.randn, torch.randn_like,
})  # fmt: skip
PLACES, CALLS = 8, 64


class Handed:
    """Collects the calls of one look. ``calls`` are those of loss functions that returned, ``pending`` the one that has not."""

    def __init__(self, want: frozenset[str]) -> None:
        """``want``: the statistics that are due."""
        self.calls: list[Call] = []
        self.pending: Call | None = None
        self.embeddings: list[tuple[str, Any, Tensor]] = []
        self.indices: dict[str, tuple[Any, Any]] = {}
        self.glimpses: dict[str, Tensor] = {}
        self._prediction: Tensor | None = None
        self._outputs = frozenset(key.partition(".")[2] for key in want if key.startswith("output."))
        self._indices = not want.isdisjoint(("module.index_min", "module.index_max"))
        self._embeddings = self._indices or any(key.startswith("input.") for key in want)
        self._made: dict[int, tuple[Any, str, nn.Module]] = {}
        self._unreduced: list[tuple[weakref.ref[Tensor], Call]] = []
        self._targets: dict[int, weakref.ref[Tensor]] = {}
        self._measured: set[tuple[str, str]] = set()
        self._by_hand = ByHand()

    def forget(self) -> None:
        """The forward is over: autograd nodes and predictions are let go."""
        self._made, self._unreduced, self._targets, self._prediction = {}, [], {}, None
        self._by_hand.forget()

    # ---- modules

    @torch.no_grad()
    def entering(self, path: str, module: nn.Module, args: Sequence[Any]) -> None:
        """An embedding is about to be called."""
        index = args[0] if args else None
        if not self._embeddings or not isinstance(index, Tensor) or index.is_floating_point() or not usable(index) or not index.numel():
            return
        if len(self.embeddings) < CALLS:
            self.embeddings.append((path, module, index))
        if self._indices:
            low, high = torch.aminmax(index)
            least, most = (int(low), int(high)) if index.device.type == "cpu" else (low, high)
            name = path or type(module).__name__
            if name in self.indices:
                least, most = smaller(self.indices[name][0], least), -smaller(-self.indices[name][1], -most)
            self.indices[name] = least, most
            self._glimpse(name, least, most)

    def returned(self, path: str, module: nn.Module, outputs: Sequence[Tensor]) -> None:
        """A module without parts has returned: its outputs are known by their autograd nodes."""
        for tensor in outputs:
            node = tensor.grad_fn
            if node is not None:
                self._made.setdefault(id(node), (node, path, module))

    # ---- functions

    @torch.no_grad()
    def before(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A loss function is about to be called."""
        self.pending, self._prediction = None, None
        read = read_call(function, args, kwargs)
        if read is None or len(self.calls) >= CALLS:
            return
        call, prediction = read
        if not prediction.requires_grad or not prediction.is_floating_point() or not usable(prediction) or not usable(call.label):
            return  # a metric, not a loss
        self._take(call, prediction)
        self.pending, self._prediction = call, prediction
        if call.indices and call.label.numel() and call.label.device.type == "cuda":
            low, high = torch.aminmax(call.label)
            outside = ((call.label < 0) | (call.label >= call.classes)) & (call.label != call.ignored)
            self._glimpse("label", low, high, outside.sum())

    def _take(self, call: Call, prediction: Tensor) -> None:
        call.origin = origin_of(prediction, self._made)
        call.target_made = self._is_made(call.label) or call.label.requires_grad
        place = call.function, call.origin.layer
        if place not in self._measured and len(self._measured) < PLACES:
            self._measured.add(place)
            call.numbers = measure(prediction, call.axis, self._outputs) if self._outputs else {}

    def after(self, result: Any) -> Tensor | None:
        """The loss function has returned; gives the prediction of a call that is kept."""
        call, prediction = self.pending, self._prediction
        self.pending, self._prediction = None, None
        if call is None or not isinstance(result, Tensor):
            return None
        if result.dim() == 0:
            call.result = result.detach()
        else:
            self._unreduced.append((weakref.ref(result), call))
        self.calls.append(call)
        return prediction

    @torch.no_grad()
    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Another function of interest was called: a factory, a product with unreduced losses, a part of a loss that is written out. True where
        nothing else is to be seen in it."""
        if function in FACTORIES:
            if isinstance(result, Tensor) and len(self._targets) < CALLS:
                self._targets[id(result)] = weakref.ref(result)
            return True
        if function in OPERATIONS:
            read = self._by_hand.other(function, args, kwargs, result)
            if read is not None and len(self.calls) < CALLS:
                self._take(*read)
                self.calls.append(read[0])
            return True
        if function not in PRODUCTS or len(args) < 2:
            return False
        for one, another in ((args[0], args[1]), (args[1], args[0])):
            if isinstance(one, Tensor) and self._is_made(one) and isinstance(another, int | float) and isinstance(result, Tensor):
                self._targets[id(result)] = weakref.ref(result)
                return True
            call = next((call for kept, call in self._unreduced if kept() is one), None)
            if call is not None and isinstance(another, Tensor) and another.numel() > 1 and another.dtype is not torch.bool:
                weights = another.detach()
                call.sample_weights = ((weights != 0) & (weights != 1)).any()  # a mask of zeros and ones weighs nothing
                return True
        return False

    def _glimpse(self, name: str, *cells: Any) -> None:
        """Copy device numbers towards the host before a call that may stop the device for good: after its error nothing can be read."""
        if isinstance(cells[0], Tensor) and cells[0].device.type == "cuda":
            host = torch.empty(len(cells), dtype=torch.float32, pin_memory=True)
            self.glimpses[name] = host.copy_(torch.stack([cell.reshape(()).float() for cell in cells]), non_blocking=True)

    def _is_made(self, tensor: Tensor) -> bool:
        for candidate in (tensor, tensor._base):
            kept = self._targets.get(id(candidate)) if candidate is not None else None
            if kept is not None and kept() is candidate:
                return True
        return False
