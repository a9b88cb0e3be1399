r"""Custom losses: a function of one example's prediction and target that returns a scalar.

Gradient and Hessian are computed using automatic differentiation in prediction space, for all examples at once. The
symmetric factor comes from the eigendecomposition of the Hessian, $S = Q \sqrt{\Lambda}$. A criterion that is not
convex may have negative eigenvalues and no such factor. This raises an error unless clipping is requested.

Without a likelihood, targets cannot be drawn. Pass it as a function from a prediction to a distribution of
`torch.distributions`. Its negative log-density is then used for draws and for the Fisher matrix.

Distributions draw labels on the CPU and check their arguments. `fisher_factor`, `fisher_product` and `sampled_gradient`
therefore synchronize with an accelerator, and cannot be part of a CUDA graph. The same holds for `hessian_factor`
because of its eigensolver.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.func import grad, hessian, jvp, vmap

from kfs.errors import DtypeError, LossError, ShapeError
from kfs.losses.draws import Draws
from kfs.losses.interface import Loss
from kfs.runtime import sync


class Custom(Loss):
    """A loss that is defined by a function of one example.

    Args:
        function: `(f, y) -> scalar` for one example, in torch operations that `torch.func.vmap` supports.
        reduction: `"mean"` over data, or `"sum"`.
        likelihood: `f -> torch.distributions.Distribution` for one example's prediction, from which targets are drawn.
        negative: How to treat negative eigenvalues of a Hessian in its symmetric factor: `"refuse"` raises an error,
            `"clip"` sets them to zero.

    Example:
        >>> loss = Custom(lambda f, y: torch.cosh(f - y).log().sum())
        >>> f, y = torch.zeros(2, 3), torch.ones(2, 3)
        >>> loss.hessian_factor(f, y).shape
        torch.Size([3, 2, 3])
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        reduction: str = "mean",
        likelihood: Callable[[Tensor], Distribution] | None = None,
        negative: Literal["refuse", "clip"] = "refuse",
    ) -> None:
        super().__init__(getattr(function, "__name__", type(function).__name__), reduction)
        if not callable(function):
            raise LossError(
                f"The loss is {function!r}, which is neither a supported loss module nor a function.",
                "Pass a torch.nn loss module, or a function (f, y) -> scalar of one example's prediction and target.",
            )
        if negative not in {"refuse", "clip"}:
            raise LossError(f"negative={negative!r} is unknown.", "Choose negative='refuse' or negative='clip'.")
        self.function, self.likelihood, self.negative = function, likelihood, negative

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error if the function does not return a scalar tensor for one example."""
        if not len(f):
            return
        value = self.function(f[0].detach(), y[0])
        if not isinstance(value, Tensor):
            raise DtypeError(f"{self.name} returned a {type(value).__name__}.", "Return a scalar tensor.")
        if value.ndim != 0:
            raise ShapeError(
                f"{self.name} returned shape {list(value.shape)} for one example, expected a scalar.",
                "Sum or average over the entries of one example inside of the function.",
            )

    def count(self, y: Tensor) -> float:
        """Return the number of examples."""
        return len(y)

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Evaluate the function on every example."""
        values: Tensor = vmap(self.function)(f, y)
        return values

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Differentiate the function on every example."""
        gradients: Tensor = vmap(grad(self.function))(f, y)
        return gradients

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Differentiate the gradient in the directions `v`."""
        columns = v.reshape(-1, *f.shape)
        product: Tensor = vmap(lambda u: jvp(lambda f: self.gradient(f, y), (f,), (u,))[1])(columns)
        return product.reshape(v.shape)

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the eigenvectors, scaled by the square roots of their eigenvalues. The eigensolver synchronizes."""
        return self._factor(vmap(hessian(self.function))(f, y), f)[start:stop]

    def fisher_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply with the expected outer product of the log-density's gradient, using `fisher_factor`."""
        S = self.fisher_factor(f, y)
        S, columns = S.reshape(*S.shape[:2], -1), v.reshape(-1, len(f), f[0].numel())
        return torch.einsum("kni,knj,cnj->cni", S, S, columns).reshape(v.shape)

    def fisher_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return one column for each possible label: its log-density gradient, scaled by the root of its probability.

        The distribution must have finitely many labels. Distributions synchronize with the device when they check their
        arguments, so this method cannot be part of a CUDA graph.
        """
        likelihood = self._distribution()
        # Enumerate the labels of each example's distribution.
        distributions = [likelihood(f_n) for f_n in f.detach()]
        if not all(d.has_enumerate_support for d in distributions):
            raise LossError(
                f"The expectation over {type(distributions[0]).__name__} has no closed form here.",
                "Use the Monte Carlo Fisher ('mc'), which draws labels from it.",
            )
        labels = torch.stack([d.enumerate_support() for d in distributions], 1)  # [K, N, ...]
        if labels.ndim != 2:
            raise LossError(
                f"The likelihood has {list(labels.shape[2:])} independent labels per example; they are not enumerated.",
                "Use the Monte Carlo Fisher ('mc').",
            )
        # Scale the gradient of each label by the square root of its probability.
        roots = torch.stack([d.log_prob(labels[:, n]).exp().sqrt() for n, d in enumerate(distributions)], 1)[start:stop]
        gradients = (
            torch.stack([self._log_gradient(f, label) for label in labels[start:stop]])
            if len(roots)
            else f.new_zeros(0, *f.shape)
        )
        return roots.reshape(*roots.shape, *[1] * (f.ndim - 1)) * gradients

    @property
    def hessian_needs_targets(self) -> bool:
        """True, since the Hessian of a function may depend on targets."""
        return True

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the predictions: the Fisher matrix of the likelihood does not depend on targets."""
        self._distribution()
        return f

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a target per example on the CPU, using a generator that is seeded for each example and sample.

        This synchronizes with the device and cannot be part of a CUDA graph.
        """
        likelihood = self._distribution()
        seeds = (draws.uniform(len(f), (), f.device) * 2.0**52).long().tolist()
        labels = []
        for f_n, seed in zip(f.detach().cpu(), seeds, strict=True):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                labels.append(likelihood(f_n).sample())
        return self._log_gradient(f, torch.stack(labels).to(f.device))

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Differentiate the log-density of the likelihood."""
        return -self._log_gradient(f, y)

    def _log_gradient(self, f: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient of the negative log-density of every example's label."""
        likelihood = self._distribution()
        leaf = f.detach().requires_grad_()
        with torch.enable_grad():
            values = [-likelihood(f_n).log_prob(label).sum() for f_n, label in zip(leaf, labels, strict=True)]
            return torch.autograd.grad(torch.stack(values).sum(), leaf)[0]

    def _distribution(self) -> Callable[[Tensor], Distribution]:
        if self.likelihood is None:
            raise self.no_likelihood("a function alone does not define a likelihood of targets")
        return self.likelihood

    def _factor(self, H: Tensor, f: Tensor) -> Tensor:
        """Return columns `[K, *f.shape]` from Hessians of shape `[N, ..., ...]`.

        Unless negative eigenvalues are clipped, they raise an error or, on an accelerator, become columns of NaN.
        """
        size = f[0].numel()
        eigenvalues, Q = torch.linalg.eigh(H.reshape(len(f), size, size))
        # The round-off of a symmetric eigensolver is a few eps times the largest eigenvalue times the size.
        floor = -10 * size * torch.finfo(f.dtype).eps * eigenvalues.abs().max()
        negative = eigenvalues < floor
        if self.negative == "refuse" and sync.is_asynchronous(f.device):
            eigenvalues = torch.where(negative, torch.nan, eigenvalues)
        elif self.negative == "refuse" and negative.any():
            raise LossError(
                f"{self.name} is not convex in the prediction: its Hessian has the eigenvalue "
                f"{eigenvalues.min().item():.2e}, and no symmetric factor.",
                "Accept a changed matrix with kfs.losses.Custom(..., negative='clip'), or use products with "
                "kfs.GGN(risk), which need no factor.",
            )
        S: Tensor = Q * eigenvalues.clamp(min=0).sqrt().unsqueeze(1)
        return S.movedim(2, 0).reshape(size, *f.shape)
