"""What the tests share: nets as functions of one layer, and limits of many draws."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product

from torch import Tensor, cat, stack
from torch.func import functional_call
from torch.nn import Module, Parameter

from kfs.basics.flattening import Vec, cvec, rvec
from kfs.basics.reduction_factors import Loss
from kfs.conformance.exact import exact_empirical_fisher, exact_ggn
from kfs.factors.kfac import KFAC
from kfs.factors.settings import Sharing
from kfs.problem.risk import EmpiricalRisk
from kfs.verification import verify, verify_at_most, verify_differs

DRAWS = (4, 16, 64)
REPEATS = 64
# A squared error varies by 100 to 150 percent from repeat to repeat, and by up to twice
# that if few draws matter. So the root of a mean over 64 repeats is known to about 8
# percent, and the ratio of two roots, which is a half on average, to 0.06. Three times
# that is allowed. If estimates had another limit, it would become one or more.
TOLERANCE = 0.2


class JointWeight(Module):
    """A net as a function of one layer's weight and bias, which are joined.

    Args:
        model: The net.
        layer: Name of a linear layer in it.

    Attributes:
        W: The matrix `(W b)`, or the weight if there is no bias. It is a parameter.
    """

    def __init__(self, model: Module, layer: str) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        parts = [p.flatten(1) if p.ndim > 1 else p.unsqueeze(1) for p in self._parts()]
        self.W = Parameter(cat(parts, dim=1).detach())

    def _parts(self) -> list[Tensor]:
        """Return the layer's weight and, if it has one, its bias."""
        return list(self.model.get_submodule(self.layer).parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate the net."""
        d_in = self._parts()[0].shape[1]
        values = {f"{self.layer}.weight": self.W[:, :d_in]}
        if self.W.shape[1] > d_in:
            values[f"{self.layer}.bias"] = self.W[:, d_in]
        predictions: Tensor = functional_call(self.model, values, (x,))
        return predictions


def verify_rate(
    estimate: Callable[[int], Mapping[str, Tensor]],
    exact: Mapping[str, Tensor],
    case: str,
) -> None:
    """Verify that errors of Monte Carlo estimates fall like one over a square root.

    Four times as many draws halve them, on average: `M`, `4 M` and `16 M` are compared.

    Args:
        estimate: From a number of draws to new estimates of several matrices, by name.
        exact: What they estimate.
        case: The setting.
    """
    claim = "KFAC-MC converges: four times the draws halve the distance to the GGN"
    errors = []
    for M in DRAWS:
        distances = []
        for _ in range(REPEATS):
            drawn = estimate(M)
            distances.append(stack([(drawn[k] - exact[k]).norm() for k in exact]))
        errors.append(stack(distances).square().mean(0).sqrt())
    for few, error, later in zip(DRAWS, errors, errors[1:], strict=False):
        for name, ratio in zip(exact, later / error, strict=True):
            here = f"{case}, {name}, from {few} to {4 * few} draws"
            verify_at_most(claim, abs(ratio.item() - 0.5), TOLERANCE, here)


def verify_engine(
    model: Module,
    loss: Loss,
    X: Tensor,
    y: Tensor,
    case: str,
    sharing: Sharing = "expand",
    wrong: Sharing | None = None,
    empirical_is_exact: bool | None = None,
    draws: bool = False,
) -> None:
    """Verify the same for the engine's KFAC: all layers, in both flattenings.

    Args:
        model: The net.
        loss: Its loss.
        X: Inputs.
        y: Targets.
        case: The setting.
        sharing: The variant that is exact.
        wrong: The variant that is not, for the first layer; `None` if both are.
        empirical_is_exact: Whether KFAC-empirical is; it is not tested by default.
        draws: Whether to test KFAC-MC, which takes longer.
    """
    risk = EmpiricalRisk(model, loss, (X, y))
    ggn = partial(exact_ggn, model, loss, X, y)
    for where, K, G in _blocks(KFAC(risk, "type-2", sharing), ggn):
        here = f"{case}, {where}"
        verify(f"the engine's KFAC-type-II ({sharing}) equals the GGN", K, G, case=here)

    if wrong is not None:
        first = list(_blocks(KFAC(risk, "type-2", wrong), ggn))[:2]  # both flattenings
        for where, K, G in first:
            claim = f"the engine's KFAC-type-II ({wrong}) does not"
            verify_differs(claim, K, G, case=f"{case}, {where}")

    if empirical_is_exact is not None:
        fisher = partial(exact_empirical_fisher, model, loss, X, y)
        for where, K, E in _blocks(KFAC(risk, "empirical", sharing), fisher):
            here = f"{case}, {where}"
            if empirical_is_exact:
                claim = "the engine's KFAC-empirical equals the empirical Fisher"
                verify(claim, K, E, case=here)
            else:
                claim = "the engine's KFAC-empirical differs from the empirical Fisher"
                verify_differs(claim, K, E, case=here)

    if draws:
        # There is one number of draws. Their relative error is about sqrt(2 / 400) = 7
        # percent. Four times that is allowed.
        mc = KFAC(risk, "mc", sharing, mc_samples=400, columns_at_once=400)
        for where, K, G in _blocks(mc, ggn):
            error = ((K - G).norm() / G.norm()).item()
            claim = "the engine's KFAC-MC comes close to the GGN"
            verify_at_most(claim, error, 0.3, f"{case}, {where}")


def _blocks(
    K: KFAC, exact: Callable[[Sequence[str], Vec], Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a case, the engine's block and the exact one, for layers and flattenings.

    The engine flattens weight and bias one after the other.
    """
    for block, vec in product(K.blocks.values(), (cvec, rvec)):
        names = block.layout.params
        dense = K.submatrix(names).to_dense(vec.__name__)
        yield f"{names[0]}, {vec.__name__}", dense, exact(names, vec)
