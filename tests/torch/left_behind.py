"""What may hang on the objects of a training: to be compared before and after a run, or between two runs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_internals
from torch.overrides import _get_current_function_mode_stack


def left_behind(module: nn.Module | None = None, optimizers: Iterable[torch.optim.Optimizer] = ()) -> list[str]:
    """Names of all hooks, modes and attributes that a bare module, optimizer and process would not have."""
    found = [name for name, value in vars(module_internals).items() if name.startswith("_global_") and isinstance(value, dict) and value]
    found += [f"function mode {type(mode).__name__}" for mode in _get_current_function_mode_stack()]
    for path, child in module.named_modules() if module is not None else ():
        found += [f"{path}.{name}" for name, value in vars(child).items() if name.endswith("_hooks") and value]
        found += [f"{path}.{name}" for name in vars(child) if "trainvet" in name]
    for name, parameter in module.named_parameters() if module is not None else ():
        found += [f"{name}.{kind}" for kind in ("_backward_hooks", "_post_accumulate_grad_hooks") if getattr(parameter, kind, None)]
    for optimizer in optimizers:
        found += [name for name, value in vars(optimizer).items() if name.endswith("_hooks") and value]
        found += [name for name in ("found_inf", "grad_scale") if hasattr(optimizer, name)]
    return found


def attributes(module: nn.Module) -> dict[str, list[str]]:
    """The attribute names of every module."""
    return {path: sorted(vars(child)) for path, child in module.named_modules()}


def plain(value: Any) -> Any:
    """Tensors and arrays as bytes, so that equality is bitwise (NaN equals NaN)."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = torch.view_as_real(value) if value.is_complex() else value
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else value.double().item().hex(),
        )
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def everything(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> dict[str, Any]:
    """Weights, buffers, optimizer states and the three random states, bitwise."""
    random_states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return plain({"module": module.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers], **random_states})
