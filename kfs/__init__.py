"""kfs, KFAC from scratch: curvature matrices of neural networks and their Kronecker-factored approximations.

Start with `EmpiricalRisk` (model, loss, data), its linear operators, and `KFAC`. Solvers and estimators are in
`kfs.operators`, losses in `kfs.losses`, the optimizer in `kfs.optim`, pruning in `kfs.compress`, differential equations
in `kfs.pinn`, multi-process tools in `kfs.distributed`, and the definitions, one runnable file each, in `kfs.basics`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kfs.display.suggestions import suggest
from kfs.errors import UnknownAttributeError
from kfs.version import __version__

if TYPE_CHECKING:
    from kfs import basics, compress, distributed, laplace, losses, operators, optim, pinn  # noqa: F401
    from kfs.factors import EKFAC, KFAC, Checkpoint, Relative, compare, inspect, load, per_datum
    from kfs.influence import Influence
    from kfs.merging import merge
    from kfs.operators import GGN, Fisher, Hessian, Jacobian
    from kfs.problem.data_shards import shard
    from kfs.problem.risk import EmpiricalRisk

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "Checkpoint",
    "EmpiricalRisk",
    "Fisher",
    "Hessian",
    "Influence",
    "Jacobian",
    "Relative",
    "__version__",
    "compare",
    "inspect",
    "load",
    "merge",
    "per_datum",
    "shard",
]
_PACKAGES = ("basics", "compress", "distributed", "laplace", "losses", "operators", "optim", "pinn")
# Public names by module. They are imported on first use, so that `import kfs` is fast.
_FROM = {
    "kfs.influence": ("Influence",),
    "kfs.factors": ("EKFAC", "KFAC", "Checkpoint", "Relative", "compare", "inspect", "load", "per_datum"),
    "kfs.merging": ("merge",),
    "kfs.operators": ("GGN", "Fisher", "Hessian", "Jacobian"),
    "kfs.problem.data_shards": ("shard",),
    "kfs.problem.risk": ("EmpiricalRisk",),
}


def __getattr__(name: str) -> Any:
    """Import a public name or a module of this package on first use."""
    for module, names in _FROM.items():
        if name in names:
            globals()[name] = value = getattr(import_module(module), name)
            return value
    if not name.startswith("_"):
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":  # a dependency of this module is missing
                raise
    raise UnknownAttributeError(f"{__name__} has no {name!r}.", suggest([name], __dir__()))


def __dir__() -> list[str]:
    """Return the public names and packages only."""
    return sorted((*__all__, *_PACKAGES))
