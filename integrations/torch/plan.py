"""What there is to measure in a PyTorch module: parameters by optimizer, buffers, roles, and the facts for the rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainvet.integrations.torch import host, kernels
from trainvet.statistics import Optimizer, Subject, Vector

SKETCH = 1024
TOUCHED_ROWS = 64
ADAM = ("adam", "nadam", "radam", "adamax", "adamw", "lamb", "lion", "adafactor", "rmsprop", "adagrad", "adadelta")
# torch's own that add the decay to the gradient; AdamW, Adafactor, Lion and Muon take it from the weight
COUPLED = ("SGD", "ASGD", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
NARROW = (torch.float16, torch.bfloat16)
MEASURABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


@dataclasses.dataclass
class Owned:
    """The parameters one optimizer steps: names [P], tensors [P] and their groups [P], in module order."""

    optimizer: torch.optim.Optimizer
    label: str
    names: tuple[str, ...]
    tensors: list[nn.Parameter]
    groups: tuple[str, ...]
    group_labels: tuple[str, ...]

    @property
    def fused(self) -> bool:
        """Does the optimizer update in one fused kernel (and unscale by itself)?"""
        return bool(self.optimizer.defaults.get("fused")) or any(group.get("fused") for group in self.optimizer.param_groups)


class Plan:
    """Names and order of everything measurable in ``module`` under ``optimizers``; rebuilt when either changes.

    Only floating and complex parameters that require a gradient and belong to an optimizer are measured. A tied parameter has one name, its first.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self.names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.tied: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in self.names:
                self.tied.setdefault(self.names[id(parameter)], name)
                continue
            self.names[id(parameter)] = name
            self.parameters[name] = parameter
        self._children = list(module.modules())
        self.modules: dict[int, str] = {id(child): path for path, child in module.named_modules()}
        self.buffers: dict[str, Tensor] = {}
        self.depth: dict[str, int] = {path: index for index, (path, _) in enumerate(module.named_modules())}
        self.before_norm: set[str] = set()
        labels = group_labels(self.optimizers)
        self.owned = [self._own(index, optimizer, labels[index]) for index, optimizer in enumerate(self.optimizers)]
        self.signature = self._sign()
        self.refresh_buffers()

    def again(self) -> Plan:
        """A new plan for the same module and optimizers; what was learnt about structure stays."""
        plan = Plan(self.module, self.optimizers)
        plan.depth |= self.depth
        plan.before_norm = self.before_norm
        return plan

    def refresh_buffers(self) -> None:
        """Look the floating buffers up again: user code may have replaced them."""
        self.buffers = {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if not is_lazy(buffer) and buffer.dtype in MEASURABLE and buffer.numel() and buffer.device.type != "meta"
        }

    def changed(self) -> bool:
        """Did parameters join or leave the module or an optimizer, take shape, or were any frozen or thawed? Cheap enough for sampled steps."""
        return self.signature != self._sign()

    def _sign(self) -> tuple[int, ...]:
        """Everything that hangs on the modules known so far: a walk over all modules would cost several times as much."""
        found: list[int] = []
        for child in self._children:
            found += map(id, child._modules.values())
            for parameter in child._parameters.values():
                if parameter is not None:
                    found.append(id(parameter) + (1 if parameter.requires_grad else 0) + (2 if is_lazy(parameter) else 0))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found += map(id, group["params"])
        return tuple(found)

    def _own(self, index: int, optimizer: torch.optim.Optimizer, labels: tuple[str, ...]) -> Owned:
        label = f"optimizer {index}" if len(self.optimizers) > 1 else "optimizer"
        home = {id(parameter): labels[position] for position, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
        chosen = [
            (name, parameter)
            for name, parameter in self.parameters.items()
            if id(parameter) in home and parameter.requires_grad and parameter.dtype in MEASURABLE
            if not is_lazy(parameter) and parameter.device.type != "meta"
        ]
        return Owned(
            optimizer,
            label,
            tuple(name for name, _ in chosen),
            [parameter for _, parameter in chosen],
            tuple(home[id(parameter)] for _, parameter in chosen),
            labels,
        )

    # ---- facts

    def subjects(self) -> list[Subject]:
        """Parameters and buffers as the rules know them."""
        home = {name: group for owned in self.owned for name, group in zip(owned.names, owned.groups, strict=True)}
        found = []
        for name, parameter in self.parameters.items():
            path, _, leaf = name.rpartition(".")
            owner = self.module.get_submodule(path)
            found.append(
                Subject(
                    name=name,
                    kind="parameter",
                    module=path,
                    module_type=type(owner).__name__,
                    depth=self.depth.get(path, -1),
                    shape=() if is_lazy(parameter) else tuple(parameter.shape),
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    trainable=parameter.requires_grad,
                    group=home.get(name, ""),
                    tied_to=self.tied.get(name, ""),
                    role=self._role(name, leaf, owner),
                )
            )
        for name, buffer in self.buffers.items():
            path = name.rpartition(".")[0]
            found.append(
                Subject(name, "buffer", path, "", self.depth.get(path, -1), tuple(buffer.shape), str(buffer.dtype).removeprefix("torch."), False)
            )
        return found

    def _role(self, name: str, leaf: str, owner: nn.Module) -> str:
        if is_embedding(owner) and leaf == "weight":
            return "embedding"
        if is_norm(owner):
            return "norm"
        if leaf.startswith("bias"):
            return "bias-before-norm" if name in self.before_norm else "bias"
        return ""

    def optimizer_facts(self) -> tuple[Optimizer, ...]:
        """Every optimizer with its family, hyper-parameters and parameters."""
        return tuple(self._describe(owned) for owned in self.owned)

    def _describe(self, owned: Owned) -> Optimizer:
        optimizer = owned.optimizer
        first: Mapping[str, object] = optimizer.param_groups[0] if optimizer.param_groups else {}
        type_name = type(optimizer).__name__
        adam = type_name.lower().removeprefix("fused") in ADAM or ("betas" in first and "eps" in first)
        momentum = number(first.get("momentum"))
        betas = first.get("betas")
        known = {id(parameter) for parameter in self.parameters.values()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return Optimizer(
            name=owned.label,
            type=type_name,
            family="adam" if adam else "sgd" if type_name.lower() in ("sgd", "asgd") else "other",
            epsilon=number(first.get("eps")),
            momentum=momentum,
            weight_decay=max([number(group.get("weight_decay")) for group in optimizer.param_groups], default=0.0),
            betas=tuple(number(beta) for beta in betas) if isinstance(betas, Iterable) else (),
            groups=owned.group_labels,
            parameters=tuple(self.names[id(parameter)] for parameter in held if id(parameter) in known),
            decayed=tuple(
                self.names[id(parameter)]
                for group in optimizer.param_groups
                if number(group.get("weight_decay")) > 0
                for parameter in group["params"]
                if id(parameter) in known
            ),
            coupled_decay=type_name in COUPLED and not any(group.get("decoupled_weight_decay") for group in optimizer.param_groups),
            unknown_parameters=sum(id(parameter) not in known for parameter in held),
        )


def group_labels(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, ...]]:
    """A label for every parameter group of every optimizer, none twice: the group's own name, else the optimizer's type and its place."""
    found: list[tuple[str, ...]] = []
    seen: dict[str, int] = {}
    for index, optimizer in enumerate(optimizers):
        stem = f"{type(optimizer).__name__} {index}" if len(optimizers) > 1 else type(optimizer).__name__
        labels = []
        for position, group in enumerate(optimizer.param_groups):
            label = str(group.get("name") or (stem if len(optimizer.param_groups) == 1 else f"{stem}/{position}"))
            seen[label] = seen.get(label, 0) + 1
            labels.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
        found.append(tuple(labels))
    return found


def is_embedding(module: nn.Module) -> bool:
    """A table of which a batch touches some rows only."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def is_norm(module: nn.Module) -> bool:
    """A normalisation layer, torch's own or one named like it."""
    return "norm" in type(module).__name__.lower() and not list(module.children())


def removes_bias(module: nn.Module) -> bool:
    """Does the layer subtract a mean per channel, so that a bias in front of it has no effect?"""
    return isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm)


def number(value: object) -> float:
    """A hyper-parameter as a float; 0 for what is absent or lives on a device (reading it would wait for the device)."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


class Sketch:
    """A fixed random sample of each parameter's elements, taken before and after an update.

    Up to ``SKETCH`` elements of every parameter, chosen by a generator of our own; of an embedding, the rows with the largest gradient of the
    step, since the others do not move.
    """

    def __init__(self, owned: Owned, embeddings: frozenset[str]) -> None:
        generator = torch.Generator().manual_seed(0x5EED)
        self.owned = owned
        self.indices: list[Tensor | None] = []
        for parameter in owned.tensors:
            if parameter.numel() <= SKETCH:
                self.indices.append(None)
            else:
                self.indices.append(torch.randint(parameter.numel(), (SKETCH,), generator=generator).to(parameter.device))
        self.rows = [name in embeddings and parameter.numel() > SKETCH for name, parameter in zip(owned.names, owned.tensors, strict=True)]
        self.chosen: list[Tensor | None] = []
        self._before: list[Tensor] = []
        self._host_before: host.Array | None = None
        self._moving: list[Tensor | None] = []

    @torch.no_grad()
    def take(self, whole: frozenset[str] = frozenset(), swallowed: bool = False) -> None:
        """Before the update. ``whole`` names parameters to be compared in full this time; ``swallowed``: note which elements have a gradient."""
        self.chosen = []
        for position, (name, parameter) in enumerate(zip(self.owned.names, self.owned.tensors, strict=True)):
            index = self.indices[position]
            if name in whole:
                index = None
            elif self.rows[position] and parameter.grad is not None:
                index = touched(parameter)
            self.chosen.append(index)
        values = host.arrays(self.owned.tensors)
        pairs = list(zip(self.owned.tensors, self.chosen, strict=True))
        self._moving = [moving(parameter, index) for parameter, index in pairs] if swallowed else []
        if values:
            self._host_before = host.pick(values, self.chosen)[0]
        else:
            self._before = [pick(parameter, index).clone() for parameter, index in zip(self.owned.tensors, self.chosen, strict=True)]

    @torch.no_grad()
    def compare(self) -> dict[str, Vector] | dict[str, Tensor]:
        """After the update: the columns of "update" [P], known already where the parameters lie in host memory."""
        before, host_before, had_gradient = self._before, self._host_before, self._moving
        self._before, self._host_before, self._moving = [], None, []
        values = host.arrays(self.owned.tensors) if host_before is not None else None
        if values and host_before is not None:
            after, sizes = host.pick(values, self.chosen)
            return host.update_columns(host_before, after, sizes)
        after_all = [pick(parameter, index) for parameter, index in zip(self.owned.tensors, self.chosen, strict=True)]
        columns = kernels.update_columns(before, after_all)
        if any(mask is not None for mask in had_gradient):
            columns["swallowed_share"] = kernels.swallowed(before, after_all, had_gradient)
        return columns


def moving(parameter: nn.Parameter, index: Tensor | None) -> Tensor | None:
    """Which elements of a 16-bit parameter's sample have a gradient other than 0; None for other types and where there is none."""
    gradient = parameter.grad
    if gradient is None or parameter.dtype not in NARROW or gradient.layout is not torch.strided:
        return None
    return pick(gradient, index) != 0


def touched(parameter: nn.Parameter) -> Tensor:
    """Flat indices of the first elements of the rows with the largest gradient, found without waiting for the device."""
    gradient = parameter.grad
    assert gradient is not None
    width = parameter.shape[-1]
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows = gradient.indices()[0][:TOUCHED_ROWS]
    else:
        size = gradient.reshape(-1, width)[:, 0].abs()  # one column finds them: a touched row's first element is hardly ever exactly 0
        rows = size.topk(min(TOUCHED_ROWS, len(size))).indices
    columns = torch.arange(min(width, SKETCH // TOUCHED_ROWS), device=rows.device)
    return (rows[:, None] * width + columns[None]).reshape(-1)


def pick(parameter: Tensor, index: Tensor | None) -> Tensor:
    """A flat float sample of a tensor; complex elements as pairs."""
    flat = parameter.detach().reshape(-1)
    flat = flat if index is None else flat[index]
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
