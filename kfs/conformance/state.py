"""What an implementation must leave as it was: the user's model, and PyTorch's global state."""

from typing import Any

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def fingerprint(model: nn.Module, with_random_state: bool) -> dict[str, Any]:
    """Return everything that must be the same before and after a call, by what it is."""
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    found: dict[str, Any] = {
        "modules (layers were wrapped or replaced)": {name: id(module) for name, module in modules.items()},
        "train and eval modes": {name: module.training for name, module in modules.items()},
        "hooks of modules": {name: [len(getattr(module, kind)) for kind in _HOOKS] for name, module in modules.items()},
        "hooks of parameters": {name: len(p._backward_hooks or ()) for name, p in params.items()},
        "requires_grad of parameters": {name: p.requires_grad for name, p in params.items()},
        "values of parameters": {name: _content(p) for name, p in params.items()},
        "values of buffers": {name: _content(b) for name, b in model.named_buffers()},
        "gradients": {name: None if p.grad is None else _content(p.grad) for name, p in params.items()},
        "attributes of modules": {name: sorted(vars(module)) for name, module in modules.items()},
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
    }
    if with_random_state:
        found["random state (nothing random was asked for)"] = _content(torch.get_rng_state())
    return found


def _content(t: torch.Tensor) -> Any:
    return t.detach().cpu().flatten().tolist()
