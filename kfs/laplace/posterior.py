r"""The posterior over parameters, a normal distribution around the trained parameters, and its predictions.

The marginal likelihood lives in `kfs.laplace.evidence`, the covariance of outputs in `kfs.laplace.variance`.

For classification, `probabilities` averages the softmax over normally distributed logits, in one of three ways. Probit
replaces the logistic function by the distribution function of a normal distribution, whose average is known (MacKay,
1992). It uses only variances:

$$
p = \mathrm{softmax}\Big(f_k \big/ \sqrt{1 + \pi \Sigma_{kk} / 8}\Big)_k.
$$

Monte Carlo averages the softmax over draws. The Laplace bridge (Hobbhahn et al., 2022) is the mean of a Dirichlet
distribution with the parameters $\alpha_k = (1 - 2 / C + e^{f_k} \sum_l e^{-f_l} / C^2) / \Sigma_{kk}$, for the
distribution of logits given that they sum up to zero. For two classes, it is the softmax of $f$, whatever $\Sigma$ is.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from math import log, pi
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn

from kfs.display.describe import Described, Description, counted, kind, number
from kfs.display.suggestions import suggest
from kfs.errors import ModelError
from kfs.factors.blocks import BlockDiagonal
from kfs.factors.match import check_curvature, check_parameters, warn_of_other_values
from kfs.laplace.evidence import decomposed, evidence
from kfs.laplace.likelihood import (
    NAME,
    Likelihood,
    Number,
    Prior,
    check_arguments,
    is_regression,
    likelihood_of,
    priors_by_name,
)
from kfs.laplace.variance import NO_LOSS, output_covariance, output_mean, risk_of_inputs
from kfs.losses.binary import BinaryCrossEntropy
from kfs.losses.cross_entropy import CrossEntropy, TokenCrossEntropy
from kfs.losses.interface import Loss
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.whole_parameters import whole

Link = Literal["probit", "mc", "bridge"]
# Approximate number of sampled logits that are stored at once.
_NUMBERS = 2**24


def probabilities(loss: Loss, f: Tensor, covariance: Tensor, link: str, num_samples: int, seed: int) -> Tensor:
    """Average the probabilities of classes over a normal distribution of logits, approximately.

    Args:
        loss: The loss, which determines the class axis of the logits.
        f: Mean of the logits, `[n, *outputs]`.
        covariance: Covariance of the logits, `[n, outputs, outputs]`; several output axes are flattened.
        link: The approximation: `"probit"`, `"mc"` or `"bridge"`.
        num_samples: Number of samples for Monte Carlo.
        seed: Seed for the samples.

    Returns:
        Probabilities with the shape of the logits.
    """
    if link == "mc":
        return _monte_carlo(loss, f, covariance, num_samples, seed)
    if link == "bridge":
        return _bridge(f, covariance, _class_axis(loss))
    variance = covariance.diagonal(dim1=1, dim2=2).reshape(f.shape)
    return _squashed(loss, f / (1 + pi / 8 * variance).sqrt())


def _class_axis(loss: Loss) -> int:
    return -1 if isinstance(loss, TokenCrossEntropy) else 1


def _squashed(loss: Loss, logits: Tensor) -> Tensor:
    """Return the class probabilities for logits `[n, *outputs]`."""
    return logits.sigmoid() if isinstance(loss, BinaryCrossEntropy) else logits.softmax(_class_axis(loss))


def _monte_carlo(loss: Loss, f: Tensor, covariance: Tensor, num_samples: int, seed: int) -> Tensor:
    """Average probabilities over samples of logits.

    All examples use the same random numbers, so that the result does not depend on batches.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(covariance.shape[1], num_samples, dtype=f.dtype, generator=generator).to(f.device)
    means = []
    at_once = max(1, _NUMBERS // draws.numel())
    for mean, part in zip(f.split(at_once), covariance.split(at_once), strict=True):
        logits = mean.flatten(1).unsqueeze(1) + (_root(part) @ draws).transpose(1, 2)  # [n, samples, outputs]
        p = _squashed(loss, logits.reshape(-1, *f.shape[1:]))
        means.append(p.reshape(len(mean), num_samples, *f.shape[1:]).mean(1))
    return torch.cat(means)


def _root(covariance: Tensor) -> Tensor:
    """Return `L` with `L L^T = covariance`: a Cholesky factor, or a root by eigenvalues if a matrix is singular."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(covariance)
    if not failed.any():
        return root
    values, vectors = torch.linalg.eigh(covariance)
    by_eigenvalues = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    return torch.where(failed.reshape(-1, 1, 1) > 0, by_eigenvalues, root)


def _bridge(f: Tensor, covariance: Tensor, axis: int) -> Tensor:
    """Return the mean of the Dirichlet distribution that the Laplace bridge assigns to the logits."""
    by_position = f.movedim(axis, -1)
    classes = f.shape[axis]
    # Indices of the classes of each position in the flattened outputs, [positions, classes].
    places = torch.arange(f[0].numel(), device=f.device).reshape(f.shape[1:])
    places = places.movedim(axis - 1 if axis > 0 else axis, -1).reshape(-1, classes)
    mean = by_position.reshape(len(f), -1, classes)
    sigma = covariance[:, places.unsqueeze(2), places.unsqueeze(1)]  # [n, positions, classes, classes]
    # Condition the logits on a sum of zero. If the sum has no variance, subtract the mean.
    rows = sigma.sum(-1)
    total = rows.sum(-1, keepdim=True)
    variance = sigma.diagonal(dim1=-2, dim2=-1)
    is_certain = total <= torch.finfo(f.dtype).eps * classes * variance.sum(-1, keepdim=True)
    gain = torch.where(is_certain, 1 / classes, rows / total.masked_fill(is_certain, 1.0))
    mean = mean - gain * mean.sum(-1, keepdim=True)
    variance = (variance - gain * rows).clamp(min=torch.finfo(f.dtype).tiny)
    # Compute in logarithms, because exponentials of logits may overflow.
    constant = mean.new_tensor(max(1 - 2 / classes, 0.0)).log()
    spread = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * log(classes)
    alpha = torch.logaddexp(constant, spread) - variance.log()
    return alpha.softmax(-1).reshape(by_position.shape).movedim(-1, axis)


Model = nn.Module | Callable[[dict[str, Tensor], Any], Any]


class Posterior(Described):
    """A normal distribution around the parameters of a model. `posterior` creates it.

    Attributes:
        K: The curvature of the risk.
        risk: Model, loss and data.
        priors: The prior precision of each block, by name.
        likelihood: Scale of the curvature, noise and temperature.
        mean: Mean of the distribution: a copy of the parameters, by name.
    """

    def __init__(
        self, K: BlockDiagonal, risk: EmpiricalRisk, priors: Mapping[str, float], likelihood: Likelihood
    ) -> None:
        self.K = K
        self.risk = risk
        self.priors = dict(priors)
        self.likelihood = likelihood
        self.mean = {name: whole(risk.params[name].detach()).clone() for name in K.domain.shapes}

    def describe(self) -> Description:
        """Describe model, curvature, prior and likelihood."""
        of = f" of {self.K.of}" if self.K.of else ""
        size = f"{self.K.shape[0]:,} parameters, {counted(len(self.priors), 'block')}"
        title = f"Posterior{of}: {size}, {kind(self.K.dtype, self.K.device)}"
        facts = [f"curvature: {type(self.K).__name__}; prior precision: {self._shown_prior()}"]
        if self.likelihood.noise is not None:
            facts.append(f"noise: {number(self.likelihood.noise)}")
        if self.likelihood.temperature != 1:
            facts.append(f"temperature: {number(self.likelihood.temperature)}")
        return Description(title, tuple(facts))

    def _shown_prior(self) -> str:
        smallest, largest = min(self.priors.values()), max(self.priors.values())
        return number(smallest) if smallest == largest else f"{number(smallest)} to {number(largest)}, by block"

    @cached_property
    def _curvature(self) -> BlockDiagonal:
        """The negative curvature of the log-likelihood, without the prior."""
        return decomposed(self.K, self.likelihood.scale)

    @property
    def precision(self) -> BlockDiagonal:
        """The inverse of the covariance: the negative curvature of the log-likelihood plus the prior precision."""
        return self._curvature.power(1.0, self.priors)

    @cached_property
    def covariance(self) -> BlockDiagonal:
        """The covariance of the parameters."""
        return self._curvature.inverse(self.priors)

    @overload
    def sample(self, num_samples: int = 1, *, seed: int = 0, form: Literal["matrix"] = "matrix") -> Tensor: ...
    @overload
    def sample(self, num_samples: int = 1, *, seed: int = 0, form: Literal["dict"]) -> dict[str, Tensor]: ...
    def sample(
        self, num_samples: int = 1, *, seed: int = 0, form: Literal["matrix", "dict"] = "matrix"
    ) -> Tensor | dict[str, Tensor]:
        """Draw samples of the parameters.

        Args:
            num_samples: Number of samples.
            seed: Seed for the samples.
            form: `"matrix"` for flat vectors as columns, `"dict"` for tensors by the names of parameters.

        Returns:
            A matrix `[size, num_samples]`, or a dictionary `{name: [num_samples, *shape]}` with the same samples.
        """
        if form == "dict":
            draws = self._curvature.sample(num_samples, damping=self.priors, seed=seed, form="dict")
            return {name: self.mean[name].to(t) + t for name, t in draws.items()}
        columns = self._curvature.sample(num_samples, damping=self.priors, seed=seed, form=form)
        mean = self.K.domain.flatten({name: p.to(columns).unsqueeze(0) for name, p in self.mean.items()})
        return mean.T + columns

    def functional_variance(self, X: Any, *, batch_size: int = 256) -> Tensor:
        """Return the covariance of the outputs of the linearized network; see `kfs.laplace.functional_variance`."""
        self._warn_of_training()
        return output_covariance(
            self.K, self.covariance, risk_of_inputs(self.risk, X, _checked("batch_size", batch_size))
        )

    def predict(
        self,
        X: Any,
        *,
        link: Link | None = None,
        num_samples: int = 1_000,
        seed: int = 0,
        noise: bool = False,
        batch_size: int = 256,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Predict with the linearized network, which has normally distributed outputs for every example.

        Args:
            X: Inputs in the format that the model takes.
            link: For classification, how probabilities are averaged over the logits: `"probit"` (the default), `"mc"`
                (Monte Carlo) or `"bridge"` (the Laplace bridge; for two classes, it returns the model's own
                probability).
            num_samples: Number of samples of the logits for `"mc"`.
            seed: Seed for the samples.
            noise: For regression, whether to add the noise to the variances. If `True`, the result is the covariance of
                targets, otherwise the covariance of the model's outputs.
            batch_size: Number of examples per batch, if the inputs are a single tensor.

        Returns:
            For classification, class probabilities with the shape of the model's outputs. For regression, the mean
            `[n, *outputs]` and the covariance `[n, outputs, outputs]` of the outputs of each example; several output
            axes are flattened.

        Raises:
            ModelError: If the loss is for neither classification nor regression, or an option does not apply to it.
            DataError: If there are no inputs, or an output is not finite.

        Example:
            >>> import torch
            >>> from kfs import KFAC
            >>> _ = torch.manual_seed(0)
            >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> mean, covariance = posterior(KFAC(risk), risk, 1.0, noise=0.1).predict(torch.rand(4, 3), noise=True)
            >>> mean.shape, covariance.shape
            (torch.Size([4, 2]), torch.Size([4, 2, 2]))
        """
        self._check_prediction(link, noise)
        inputs = risk_of_inputs(self.risk, X, _checked("batch_size", batch_size))
        num_samples = _checked("num_samples", num_samples)
        self._warn_of_training()
        covariance = output_covariance(self.K, self.covariance, inputs)
        mean = output_mean(inputs)
        if not is_regression(self.risk):
            return probabilities(self.risk.loss, mean, covariance, link or "probit", num_samples, seed)
        if noise:
            covariance.diagonal(dim1=1, dim2=2).add_((self.likelihood.noise or 0.0) ** 2)
        return mean, covariance

    def _check_prediction(self, link: str | None, noise: bool) -> None:
        """Raise `ModelError` for a link that does not exist, and for options that do not apply to the loss."""
        loss = self.risk.loss
        if is_regression(self.risk):
            if link is not None:
                raise ModelError(
                    f"{loss.name} is the loss of a regression, but link={link!r} is for probabilities of classes.",
                    "Leave link= out: mean and covariance are returned.",
                )
            return
        if link not in {None, *get_args(Link)}:
            raise ModelError(f"There is no link {link!r}.", suggest([link], get_args(Link)))
        if not isinstance(loss, BinaryCrossEntropy | CrossEntropy | TokenCrossEntropy):
            raise ModelError(
                f"{loss.name} has no classes, so there are no probabilities to predict.",
                "Use functional_variance, the covariance of the model's outputs.",
            )
        if link == "bridge" and isinstance(loss, BinaryCrossEntropy):
            raise ModelError(
                f"{loss.name} has two classes for each logit. For two classes, the Laplace bridge changes nothing.",
                "Use link='probit' or link='mc'.",
            )
        if noise:
            raise ModelError(f"{loss.name} has no noise that could be added.", "Leave noise= out; it is for MSELoss.")

    def log_marginal_likelihood(self) -> Tensor:
        """Return the log marginal likelihood; see `kfs.laplace.log_marginal_likelihood`."""
        self._warn_of_training()
        return evidence(self._curvature, self.risk, self.priors, self.likelihood)

    def _warn_of_training(self) -> None:
        """Warn if parameters have changed since the curvature was computed: the model runs with the current ones."""
        warn_of_other_values(self.K, self.risk.params, stacklevel=4)


def posterior(
    K: BlockDiagonal,
    risk: EmpiricalRisk,
    prior_precision: Prior,
    *,
    noise: float | None = None,
    temperature: float = 1.0,
) -> Posterior:
    """Approximate the posterior over parameters with a normal distribution.

    The mean is the current value of the parameters. The precision is the curvature of the negative log-likelihood (a
    sum over data for every reduction of the loss) plus the precision of the prior.

    Args:
        K: The curvature of the risk: `KFAC`, `EKFAC`, or another operator with blocks.
        risk: Model, loss and data.
        prior_precision: Inverse variance of the prior: one number, or one for every block, by name. A weight decay of
            `w` in the gradient of a mean over `N` data corresponds to a prior precision of `N w`. `tune_prior` finds
            the optimal prior precision.
        noise: Standard deviation of targets, for regression.
        temperature: Divisor of the log-likelihood. Values less than one make the posterior narrower.

    Raises:
        ModelError: If parameters, loss or data differ from those of the curvature, a prior precision is not positive,
            or noise is missing.

    Example:
        >>> import torch
        >>> from kfs import KFAC
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.rand(9, 3), torch.randint(2, (9,))))
        >>> belief = posterior(KFAC(risk), risk, prior_precision=1.0)
        >>> belief.sample(5, form="dict")["weight"].shape, belief.functional_variance(torch.rand(4, 3)).shape
        (torch.Size([5, 2, 3]), torch.Size([4, 2, 2]))
        >>> belief
        Posterior of Linear with CrossEntropyLoss (mean): 8 parameters, 1 block, float32 on cpu
          curvature: KFAC; prior precision: 1
    """
    check_arguments(K, risk)
    likelihood = likelihood_of(K, risk, noise, temperature)
    return Posterior(K, risk, _numbers(priors_by_name(prior_precision, K)), likelihood)


def functional_variance(
    K: BlockDiagonal,
    risk_or_model: EmpiricalRisk | Model,
    X: Any,
    prior_precision: Prior,
    *,
    noise: float | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> Tensor:
    """Return the covariance of the outputs of the linearized network under the posterior.

    Args:
        K: The curvature of the risk: `KFAC`, `EKFAC`, or another operator with blocks.
        risk_or_model: The risk of the curvature. For `KFAC` and `EKFAC`, the model suffices.
        X: Inputs in the format that the model takes.
        prior_precision: As in `posterior`.
        noise: Standard deviation of targets, for regression. It is not added to the result.
        temperature: As in `posterior`.
        batch_size: Number of examples per batch, if the inputs are a single tensor.

    Returns:
        A tensor `[n, outputs, outputs]`; several output axes are flattened.

    Raises:
        ModelError: As in `posterior`.
        DataError: If there are no inputs.
    """
    if isinstance(risk_or_model, EmpiricalRisk):
        check_arguments(K, risk_or_model)
        risk = with_loss = risk_or_model
    else:
        check_curvature(K, NAME)
        risk, with_loss = _risk_of(K, risk_or_model), None
    likelihood = likelihood_of(K, with_loss, noise, temperature)
    covariance = decomposed(K, likelihood.scale).inverse(_numbers(priors_by_name(prior_precision, K)))
    return output_covariance(K, covariance, risk_of_inputs(risk, X, _checked("batch_size", batch_size)))


def _risk_of(K: BlockDiagonal, model: object) -> EmpiricalRisk:
    """Return a risk with a model and the parameters of the curvature, and without data.

    Raises:
        ModelError: If the model is not a module, or has other parameters.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"A {type(model).__name__} does not have parameters.", "Pass the risk of the curvature, or its module."
        )
    params = dict(model.named_parameters())
    check_parameters(K, params)
    warn_of_other_values(K, params, stacklevel=4)
    return EmpiricalRisk(model, NO_LOSS, [], list(K.domain.shapes))


def _numbers(priors: Mapping[str, Number]) -> dict[str, float]:
    return {name: float(value.detach() if isinstance(value, Tensor) else value) for name, value in priors.items()}


def _checked(name: str, number: object) -> int:
    """Return a number; raise `ModelError` if it is not a positive integer."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ModelError(f"{name} is {number!r}.", "Use an integer of at least one.")
    return number
