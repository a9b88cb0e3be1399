"""Named computations whose results must not change while the library is reorganized.

Each configuration is a function without arguments that returns numbers by name. All but one use only public names of
`kfs`, because paths of modules may change. They return no eigenvectors or singular vectors, whose signs depend on the
processor, and no round-off, such as residuals of exact solutions.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kfs
from tests.distributed.pool import Pool
from tests.referee.models import (
    RISKS,
    PartlyCovered,
    Tokens,
    Transformer,
    cnn,
    filled,
    labels,
    mlp,
    mlp_risk,
    risk_with_loss,
    run_on,
    split,
    token_data,
    uniform,
    used_device,
)

Numbers = Mapping[str, Tensor | float]
# Configurations that give other numbers on a GPU: its own random numbers; inverses of equal size are updated together,
# in other steps; and steps in float32 amplify how it rounds.
NOT_ON_A_GPU = (
    *("algebra/samples", "laplace/KFAC", "laplace/EKFAC"),
    *("training/tokens", "training/float32", "training/float32 eigen"),
)
FISHERS = ("type-2", "ggn", "mc", "empirical", "forward-only")
SHARINGS = ("expand", "reduce")
STEPS = 20


@dataclass(frozen=True)
class Configuration:
    """A named computation.

    Attributes:
        name: Its name, `"subject/variant"`.
        run: Computes its results.
        tolerance: Largest error on another processor or with another version of PyTorch, relative to the largest entry
            of a tensor.
    """

    name: str
    run: Callable[[], Numbers]
    tolerance: float

    def compute(self) -> dict[str, Tensor]:
        """Return results by name, from the same random state in every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return {key: _tensor(value) for key, value in self.run().items()}


def _tensor(value: Tensor | float) -> Tensor:
    """Return a result as a tensor; Python numbers have float64."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


CONFIGURATIONS: dict[str, Configuration] = {}
# Sums of a few dozen products in float64 differ by about 1e-15 between processors, and inverses and training steps
# multiply this by up to a few hundred.
TOLERANCE = 1e-12
# The same for float32, whose round-off is 6e-8.
FLOAT32_TOLERANCE = 1e-5


def add(name: str, run: Callable[..., Numbers], *args: Any, tolerance: float = TOLERANCE, **settings: Any) -> None:
    """Add a configuration: a function with its arguments."""
    assert name not in CONFIGURATIONS, f"two configurations are called {name}"
    CONFIGURATIONS[name] = Configuration(name, partial(run, *args, **settings), tolerance)


def vectors(size: int, number: int = 2) -> Tensor:
    """Return fixed columns `[size, number]`."""
    return uniform(size, number, seed=50)


# Factors.


def factors_of(K: Any) -> dict[str, Tensor]:
    """Return both factors of all blocks."""
    return {f"{name}.{side}": getattr(block, side) for name, block in K.blocks.items() for side in ("A", "B")}


def factors(model: str, **settings: Any) -> Numbers:
    """Compute KFAC's factors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Factors wider than max_dim")
        return factors_of(kfs.KFAC(RISKS[model](), **settings))


for model, fisher, sharing in product(RISKS, FISHERS, SHARINGS):
    add(f"factors/{model}/{fisher}/{sharing}", factors, model, fisher=fisher, sharing=sharing)
add("factors/separate biases", factors, "mlp", joint_bias=False)
add("factors/diagonal of wide sides", factors, "cnn", max_dim=10)
add("factors/several Monte Carlo samples", factors, "transformer", fisher="mc", mc_samples=3, seed=5)
add("factors/sharing by layer", factors, "cnn", sharing={"0": "reduce", "2": "expand", "5": "reduce"})
add("factors/one column at a time", factors, "tokens", columns_at_once=1)
add("factors/without audit", factors, "transformer", audit=False)


def uncovered_factors() -> Numbers:
    """Compute factors, and the diagonal of a parameter that no rule covers."""
    model = filled(PartlyCovered())
    K = kfs.KFAC(risk_with_loss(nn.CrossEntropyLoss(), model, labels(3, 6, seed=2)), uncovered="diagonal")
    return {"dense": K.to_dense(), "diagonal": K.diagonal()}


def functional_factors() -> Numbers:
    """Compute factors of a function of parameters, one of which is excluded."""
    params = {"W": uniform(4, 3, seed=3), "b": uniform(4, seed=4), "V": uniform(2, 4, seed=5)}

    def predict(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ params["W"].T + params["b"]) @ params["V"].T

    risk = kfs.EmpiricalRisk(predict, nn.MSELoss(), (uniform(5, 3, seed=1), uniform(5, 2, seed=2)), params=params)
    return factors_of(kfs.KFAC(risk))


def merged_factors() -> Numbers:
    """Compute factors of two parts of the data, and add them up; and update factors with further data."""
    model = filled(mlp())
    one, other = mlp_risk(model=model), mlp_risk(num_data=5, seed=7, model=model)
    K, L = kfs.KFAC(one), kfs.KFAC(other, first_datum=7)
    updated = kfs.KFAC(one).update(other)
    return factors_of(K.merge(L)) | {f"updated.{name}": t for name, t in factors_of(updated).items()}


def float32_factors() -> Numbers:
    """Compute factors in float32."""
    model = filled(cnn()).float()
    data = split(uniform(6, 2, 4, 4, seed=1).float(), uniform(6, 2, seed=2).float())
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), data))
    return factors_of(K) | {"product": K.inverse(damping=0.1) @ vectors(K.shape[1]).float()}


add("factors/uncovered parameter", uncovered_factors)
add("factors/function of parameters", functional_factors)
add("factors/merged and updated", merged_factors)
add("factors/float32", float32_factors, tolerance=FLOAT32_TOLERANCE)


# Losses.


def positive_outputs() -> nn.Module:
    """Return a model whose two outputs are positive."""
    return nn.Sequential(mlp(2), nn.Softplus())


def quartic(f: Tensor, y: Tensor) -> Tensor:
    """Return the loss of one example."""
    residual = f - y
    return (residual**2 + residual**4).sum()


LOSSES: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "weighted cross-entropy": (
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).to(uniform(1, seed=0)), label_smoothing=0.1),
        mlp,
        lambda: labels(3, 6, seed=2),
        "type-2",
    ),
    "summed squares": (lambda: nn.MSELoss(reduction="sum"), mlp, lambda: uniform(6, 3, seed=2), "mc"),
    "half squares": (kfs.losses.HalfSquaredError, mlp, lambda: uniform(6, 3, seed=2), "mc"),
    "binary cross-entropy": (nn.BCEWithLogitsLoss, mlp, lambda: labels(2, 6, 3, seed=2).double(), "mc"),
    "Poisson": (nn.PoissonNLLLoss, mlp, lambda: labels(4, 6, 3, seed=2).double(), "mc"),
    "Gaussian": (nn.GaussianNLLLoss, positive_outputs, lambda: uniform(6, seed=2), "type-2"),
    "Huber": (lambda: nn.HuberLoss(delta=0.4), mlp, lambda: uniform(6, 3, seed=2), "ggn"),
    "smooth L1": (lambda: nn.SmoothL1Loss(beta=0.4), mlp, lambda: uniform(6, 3, seed=2), "ggn"),
    "custom": (lambda: kfs.losses.Custom(quartic, reduction="sum"), mlp, lambda: uniform(6, 3, seed=2), "ggn"),
}


def loss_results(name: str) -> Numbers:
    """Compute value, gradient, a product with the GGN and KFAC's factors for a loss."""
    loss, model, targets, fisher = LOSSES[name]
    risk = risk_with_loss(loss(), filled(model()), targets())
    kind: Any = fisher
    K = kfs.KFAC(risk, fisher=kind)
    gradient = {f"gradient.{key}": t for key, t in risk.gradient().items()}
    numbers = {"value": risk.value(), "reduction factor": risk.reduction_factor}
    empirical = kfs.Fisher(risk, "empirical")
    return {**numbers, **gradient, **factors_of(K), "product": empirical @ vectors(empirical.shape[1])}


for loss_name in LOSSES:
    add(f"losses/{loss_name}", loss_results, loss_name)


# Eigenvalue correction and the algebra of blocks.


# With fewer examples, factors are singular, and eigenvectors for the eigenvalue zero depend on the processor.
ENOUGH = 24
# Gradients of keys sum to zero over positions, so this factor is singular for any number of examples.
REDUCE_EXCEPT_ATTENTION = {
    "transformer": {"layer.self_attn.in_proj_weight": "expand"},
    "padded": {"attention.in_proj_weight": "expand"},
}


def ekfac(model: str, **settings: Any) -> Numbers:
    """Multiply with EKFAC and its inverse, and compute invariants."""
    E = kfs.EKFAC(RISKS[model](num_data=ENOUGH), **settings)
    V = vectors(E.shape[1])
    inverse = E.inverse(damping=0.1) @ V
    return {"product": E @ V, "inverse": inverse, "eigenvalues": E.eigenvalues(), "diagonal": E.diagonal()}


for model in RISKS:
    add(f"ekfac/{model}/expand", ekfac, model)
    add(f"ekfac/{model}/reduce", ekfac, model, sharing=REDUCE_EXCEPT_ATTENTION.get(model, "reduce"))
for fisher in ("ggn", "mc", "empirical"):
    add(f"ekfac/transformer/{fisher}", ekfac, "transformer", fisher=fisher)


def ekfac_from_kfac() -> Numbers:
    """Correct the eigenvalues of a KFAC."""
    risk = mlp_risk()
    E = kfs.EKFAC.from_kfac(kfs.KFAC(risk), risk)
    return {"dense": E.to_dense()}


def inverse(model: str, damping: Any, method: Any) -> Numbers:
    """Multiply with a damped inverse."""
    K = kfs.KFAC(RISKS[model]())
    V = vectors(K.shape[1])
    operator = K.inverse(damping=damping, method=method)
    return {"product": operator @ V, "solution": K.solve(V[:, 0], damping=damping, method=method)}


def algebra(model: str) -> Numbers:
    """Compute products, sums, roots and invariants of KFAC."""
    K = kfs.KFAC(RISKS[model]())
    V = vectors(K.shape[1])
    named = K @ RISKS[model]().gradient()
    damped = K.inverse(damping=0.1)
    return {
        "product": K @ V,
        "root": K.power(0.5, damping=0.1) @ V,
        "eigenvalues": K.eigenvalues(),
        "trace": K.trace(),
        "diagonal": K.diagonal(),
        "Frobenius norm": K.frobenius_norm(),
        "logdet of the inverse": damped.logdet(),
        "diagonal of the inverse": damped.diagonal(),
        "mean eigenvalue": K.mean_eigenvalue(),
        **{f"product.{name}": t for name, t in named.items()},
    }


def dense(flattening: str) -> Numbers:
    """Return all entries of KFAC."""
    return {"dense": kfs.KFAC(mlp_risk()).to_dense(flattening)}


def sum_of_two() -> Numbers:
    """Invert the sum of two KFACs."""
    model = filled(mlp())
    K, L = kfs.KFAC(mlp_risk(model=model)), kfs.KFAC(mlp_risk(num_data=9, seed=7, model=model), fisher="empirical")
    V = vectors(K.shape[1])
    both: Any = K + L
    solved = both.inverse(damping=0.05)
    return {"sum": both @ V, "inverse": solved @ V, "logdet": solved.logdet(), "scaled": (2.0 * K + L) @ V}


def samples_of_kfac() -> Numbers:
    """Draw from normal distributions whose covariance is KFAC."""
    K = kfs.KFAC(mlp_risk())
    return {"samples": K.sample(3, damping=0.1, seed=4)}


add("ekfac/from KFAC", ekfac_from_kfac)
for method, (name, damping) in product(
    ("exact", "factored", "per-factor"), {"absolute": 0.1, "relative": kfs.Relative(0.2)}.items()
):
    add(f"inverse/{name}/{method}", inverse, "cnn", damping, method)
add("inverse/tokens", inverse, "tokens", kfs.Relative(0.1), "exact")
add("inverse/tied", inverse, "tied", 0.05, "factored")
add("inverse/by block", inverse, "mlp", {"0": 0.1, "2": kfs.Relative(0.5)}, "exact")
add("inverse/sum of two", sum_of_two)
for model in RISKS:
    add(f"algebra/{model}", algebra, model)
for flattening in ("rvec", "cvec"):
    add(f"algebra/dense {flattening}", dense, flattening)
add("algebra/samples", samples_of_kfac)


# Operators without structure.

OPERATORS: dict[str, Callable[[kfs.EmpiricalRisk], Any]] = {
    "Hessian": kfs.Hessian,
    "GGN": kfs.GGN,
    "Fisher type-2": kfs.Fisher,
    "Fisher mc": lambda risk: kfs.Fisher(risk, "mc", mc_samples=2, seed=3),
    "Fisher empirical": lambda risk: kfs.Fisher(risk, "empirical"),
    "Jacobian": kfs.Jacobian,
    "Jacobian transposed": lambda risk: kfs.Jacobian(risk).T,
    "GGN by layer": lambda risk: kfs.GGN(risk, block_diagonal="layer"),
    "Hessian by parameter": lambda risk: kfs.Hessian(risk, block_diagonal="parameter"),
}


def operator_product(operator: str, model: str) -> Numbers:
    """Multiply with an operator."""
    A = OPERATORS[operator](RISKS[model]())
    return {"product": A @ vectors(A.shape[1])}


def gradient(model: str) -> Numbers:
    """Compute value, gradient and reduction factor of a risk."""
    risk = RISKS[model]()
    numbers = {"value": risk.value(), "reduction factor": risk.reduction_factor, "num_data": risk.num_data}
    return {**numbers, **risk.gradient()}


def estimates() -> Numbers:
    """Estimate invariants of the GGN by products with it."""
    G = kfs.GGN(mlp_risk())
    trace, diagonal = kfs.operators.trace(G, products=12), kfs.operators.diagonal(G, products=8)
    norm = kfs.operators.squared_frobenius_norm(G, products=8)
    return {
        "trace": trace.value,
        "trace error": trace.error,
        "diagonal": diagonal.value,
        "squared norm": norm.value,
        "largest eigenvalues": kfs.operators.eigenvalues(G, 3)[0],
    }


def solutions() -> Numbers:
    """Solve a system with the damped GGN by iterations, with and without preconditioner."""
    risk = mlp_risk()
    damped, b = kfs.GGN(risk).shift(0.1), vectors(len(vectors(kfs.GGN(risk).shape[1])))[:, 0]
    plain = kfs.operators.solve(damped, b, tolerance=1e-10)
    helped = kfs.operators.solve(damped, b, tolerance=1e-10, preconditioner=kfs.KFAC(risk).inverse(damping=0.1))
    return {"plain": plain.x, "preconditioned": helped.x, "iterations": helped.iterations}


for operator, model in product(OPERATORS, ("mlp", "transformer")):
    add(f"operators/{operator}/{model}", operator_product, operator, model)
for model in ("cnn", "tokens", "lstm", "padded"):
    add(f"operators/GGN/{model}", operator_product, "GGN", model)
    add(f"operators/Hessian/{model}", operator_product, "Hessian", model)
for model in RISKS:
    add(f"gradient/{model}", gradient, model)
add("operators/estimates", estimates)
# Both solutions are as accurate as their tolerance: on other processors, iterations stop at other points.
add("operators/solutions", solutions, tolerance=1e-9)


# Training.


def weights(model: nn.Module) -> Tensor:
    """Return a copy of all parameters, in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def batches(dtype: torch.dtype = torch.float64, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return one batch per step, with labels that can be learned."""
    X = uniform(STEPS * size, 3, seed=1).to(dtype)
    return split(X, X.argmax(1), size)


def train(
    model: nn.Module,
    loss: Any,
    data: list[tuple[Any, Tensor]],
    parts: int = 1,
    params: Any = None,
    resumed_at: int | None = None,
    **settings: Any,
) -> Numbers:
    """Take one step of `kfs.optim.KFAC` per batch.

    Args:
        model: The model.
        loss: Its loss.
        data: One batch per step.
        parts: Number of passes that gradients are accumulated over.
        params: Parameter groups.
        resumed_at: If given, continue with a new optimizer after this many steps, from the state dict of the first.
        **settings: Settings of the optimizer.
    """
    optimizer = kfs.optim.KFAC(model, loss, params, **settings)
    values: list[float] = []
    for step, (x, y) in enumerate(data):
        if step == resumed_at:
            state = optimizer.state_dict()
            optimizer.close()
            optimizer = kfs.optim.KFAC(model, loss, params, **settings)
            optimizer.load_state_dict(state)

        def closure(x: Tensor = x, y: Tensor = y, optimizer: kfs.optim.KFAC = optimizer) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for some, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                value = loss(model(some), targets) / parts
                value.backward()
                total = total + value.detach()
            return total

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "KFAC does not cover")
            values.append(float(optimizer.step(closure)))
    result: dict[str, Tensor | float] = {
        "weights": weights(model),
        "losses": torch.tensor(values, dtype=torch.float64),
        "step scale": optimizer.step_scale,
        "damping scale": optimizer.damping_scale,
    }
    optimizer.close()
    return result


def train_mlp(dtype: torch.dtype = torch.float64, **settings: Any) -> Numbers:
    """Train an MLP with the cross-entropy."""
    return train(filled(mlp()).to(dtype), nn.CrossEntropyLoss(), batches(dtype), **settings)


def train_with_loss(name: str, **settings: Any) -> Numbers:
    """Train an MLP with another loss."""
    loss = {
        "square": nn.MSELoss(),
        "summed squares": nn.MSELoss(reduction="sum"),
        "binary cross-entropy": nn.BCEWithLogitsLoss(),
    }[name]
    return train(filled(mlp()), loss, [(x, (x > 0).double()) for x, _ in batches()], **settings)


def train_tokens(**settings: Any) -> Numbers:
    """Train a model with embedding and LayerNorm on tokens."""
    X, y = token_data(STEPS * 4)
    return train(filled(Tokens()), kfs.losses.TokenCrossEntropy(), split(X, y), **settings)


def train_cnn(**settings: Any) -> Numbers:
    """Train a CNN with the square loss."""
    data = split(uniform(STEPS * 4, 2, 4, 4, seed=1), uniform(STEPS * 4, 2, seed=2))
    return train(filled(cnn()), nn.MSELoss(), data, **settings)


def train_groups(**settings: Any) -> Numbers:
    """Train with different learning rates, and biases with AdamW."""
    model = filled(mlp())
    groups = [
        {"params": [p], "lr": 0.5 + 0.1 * place, "method": "adamw" if p.ndim == 1 else "kfac"}
        for place, p in enumerate(model.parameters())
    ]
    return train(model, nn.CrossEntropyLoss(), batches(), params=groups, **settings)


def train_partly_covered(**settings: Any) -> Numbers:
    """Train a model with a parameter that KFAC does not cover."""
    return train(filled(PartlyCovered()), nn.CrossEntropyLoss(), batches(), **settings)


add("training/default", train_mlp)
add("training/eigen", train_mlp, eigen=True)
# Learning rate and momentum solve a system whose two directions become nearly parallel.
add("training/quadratic model", train_mlp, quadratic_model=True, tolerance=1e-9)
add("training/without noise control", train_mlp, noise=None)
add("training/accumulated gradients", train_mlp, parts=2)
add("training/resumed", train_mlp, resumed_at=9)
add("training/often", train_mlp, factors_every=1, inverses_every=1, fisher="type-2", weight_decay=0.1)
add("training/exact damping", train_mlp, damping_method="exact", damping_unit="absolute", fisher="empirical")
add("training/clipped", train_mlp, kl_clip=1e-3, trust=None, fisher="type-2")
add("training/reduce", train_mlp, sharing="reduce", fisher="forward-only")
add("training/groups", train_groups)
add("training/partly covered", train_partly_covered)
add("training/tokens", train_tokens)
add("training/tokens eigen", train_tokens, eigen=True, factors_every=2, inverses_every=3)
add("training/cnn", train_cnn, inverses_every=5)
for name in ("square", "summed squares", "binary cross-entropy"):
    add(f"training/{name}", train_with_loss, name)
# Twenty steps with damped inverses, of condition number 300, amplify float32 differences: 1e-4 was observed.
add("training/float32", train_mlp, torch.float32, tolerance=2e-3)
add("training/float32 eigen", train_mlp, torch.float32, eigen=True, tolerance=2e-3)


@contextmanager
def taped_optimizer() -> Iterator[None]:
    """Treat the CPU as an accelerator whose graphs are tapes.

    PRIVATE NAMES: this is the only code of the referee that needs them. Update these paths if modules move.
    """
    import pytest  # noqa: PLC0415

    from kfs.runtime import cuda_graphs, sync  # noqa: PLC0415
    from tests.factors.tape import Tapes  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "recorder_for", lambda *_: Tapes)
        patch.setattr(sync, "is_asynchronous", lambda _: True)
        sync._constants.clear()
        try:
            yield
        finally:
            sync._constants.clear()


def train_recorded(run: Callable[..., Numbers], **settings: Any) -> Numbers:
    """Train with recordings, as on a GPU; it needs private names, see `taped_optimizer`."""
    with taped_optimizer():
        return run(factors_every=3, inverses_every=3, **settings)


add("training/recorded", train_recorded, train_mlp, fisher="type-2", weight_decay=0.1)
add("training/recorded Monte Carlo", train_recorded, train_mlp)
add("training/recorded tokens", train_recorded, train_tokens, fisher="type-2")


# Per-example gradients, and influence.


def single_gradients(model: str) -> Numbers:
    """Compute per-example gradients, and inner products of the first batch's."""
    found = list(kfs.per_datum(RISKS[model]()))
    names = list(found[0].tensors())
    all_of_them = {name: torch.cat([batch.tensors()[name] for batch in found]) for name in names}
    return {**all_of_them, "inner": found[0].inner(found[0]), "squared norms": found[0].squared_norms()}


for model in RISKS:
    add(f"single gradients/{model}", single_gradients, model)


def influence_pair(seed: int = 7) -> tuple[kfs.EmpiricalRisk, kfs.EmpiricalRisk]:
    """Return risks of queries and of training data, with one model."""
    model = filled(mlp())
    return mlp_risk(num_data=3, seed=seed, model=model), mlp_risk(num_data=9, model=model)


def scores(make: Callable[..., Any], damping: Any = None, method: str = "exact", **settings: Any) -> Numbers:
    """Compute scores of training data for queries."""
    queries, train = influence_pair()
    how: Any = method
    found: Any = kfs.Influence(make(train), damping, how).scores(queries, train, **settings)
    return found if isinstance(found, dict) else {"scores": found}


def ranked() -> Numbers:
    """Return the examples with most influence, and self-scores."""
    queries, train = influence_pair()
    influence = kfs.Influence(kfs.EKFAC(train))
    top = influence.top(queries, train, k=4)
    return {
        "self": influence.self_scores(train),
        "helpful": top.helpful.values,
        "which help": top.helpful.indices,
        "harmful": top.harmful.values,
        "which harm": top.harmful.indices,
    }


def token_scores() -> Numbers:
    """Compute scores of single tokens."""
    risk = RISKS["tokens"]()
    return {"scores": kfs.Influence(kfs.EKFAC(risk)).scores(risk, risk, by="token")}


def indexed(**settings: Any) -> Numbers:
    """Compute scores with stored gradients of training data."""
    queries, train = influence_pair()
    index = kfs.Influence(kfs.EKFAC(train)).index(train, dtype=torch.float64, **settings)
    return {"scores": index.scores(queries), "self": index.self_scores()}


add("influence/EKFAC", scores, kfs.EKFAC)
add("influence/KFAC", scores, kfs.KFAC, 0.05, "factored")
add("influence/by block", scores, kfs.EKFAC, by="block")
add("influence/cosine", scores, kfs.EKFAC, normalize="cosine")
add("influence/margin", scores, kfs.EKFAC, of="margin", of_train="log-probability")
add("influence/queries of low rank", scores, kfs.EKFAC, query_rank=2)
add("influence/ranked", ranked)
add("influence/tokens", token_scores)
add("influence/index", indexed)
add("influence/index of low rank", indexed, rank=2)


# Laplace approximation.


def laplace(make: Callable[..., Any], **settings: Any) -> Numbers:
    """Compute samples, variances and evidence of a posterior."""
    risk = mlp_risk(num_data=12)
    K, X = make(risk), uniform(4, 3, seed=9)
    posterior = kfs.laplace.posterior(K, risk, 2.0, **settings)
    probabilities: Any = posterior.predict(X, link="probit")
    evidence = kfs.laplace.log_marginal_likelihood(K, risk, {"0": 1.5, "2": 3.0}, **settings)
    return {
        "samples": posterior.sample(3, seed=5),
        "variance": posterior.functional_variance(X),
        "evidence": posterior.log_marginal_likelihood(),
        "evidence by block": evidence,
        "probabilities": probabilities,
    }


def tuned() -> Numbers:
    """Choose precision and noise of a regression by evidence."""
    risk = risk_with_loss(nn.MSELoss(), filled(mlp(2)), uniform(12, 2, seed=2))
    K = kfs.KFAC(risk)
    prior, noise = kfs.laplace.tune_prior_and_noise(K, risk)
    precision: Any = prior
    posterior = kfs.laplace.posterior(K, risk, 2.0, noise=0.3)
    mean, covariance = posterior.predict(uniform(4, 3, seed=9))
    return {"prior precision": precision, "noise": noise, "mean": mean, "covariance": covariance}


add("laplace/KFAC", laplace, kfs.KFAC)
add("laplace/EKFAC", laplace, kfs.EKFAC, temperature=0.5)
# The minimum of a function is as accurate as the square root of the precision.
add("laplace/tuned", tuned, tolerance=1e-6)


# Merging and compression.


def merged(make: Callable[..., Any], **settings: Any) -> Numbers:
    """Merge three models by curvature."""
    models = [filled(mlp(), seed) for seed in (0, 1, 2)]
    curvatures = [make(mlp_risk(num_data=9, seed=seed, model=model)) for seed, model in enumerate(models)]
    state: Any = kfs.merge(models, curvatures, weights=[1.0, 2.0, 1.5], **settings)
    return dict(state)


def compressed(run: Callable[..., Any], model: str = "mlp", **settings: Any) -> Numbers:
    """Compress a model, and return predictions and predicted losses."""
    risk = RISKS[model]() if model != "mlp" else mlp_risk(num_data=12)
    original, shape = {"mlp": (filled(mlp()), (5, 3)), "cnn": (filled(cnn()), (5, 2, 4, 4))}[model]
    X = uniform(*shape, seed=9)
    result = run(original, kfs.KFAC(risk), **settings)
    rows = result.report.rows
    return {
        "predictions": result.model(X),
        "kept": torch.tensor([row.kept for row in rows]),
        "increase": torch.tensor([row.increase for row in rows], dtype=torch.float64),
    }


add("merge/KFAC", merged, kfs.KFAC)
add("merge/EKFAC", merged, kfs.EKFAC, damping=0.1)
add("merge/factored", merged, kfs.KFAC, damping=kfs.Relative(0.1), method="factored")
# Conjugate gradients stop at a small residual, and iterations amplify round-off.
add("merge/GGN", merged, kfs.GGN, damping=0.1, tolerance=1e-9)
add("compress/prune", compressed, kfs.compress.prune, keep=0.5)
add("compress/prune without update", compressed, kfs.compress.prune, keep=0.5, update=False)
add("compress/prune units", compressed, kfs.compress.prune, keep=0.6, structured=True, damping=0.01)
add("compress/prune cnn", compressed, kfs.compress.prune, "cnn", keep=0.5, damping=0.01)
add("compress/prune in eigenbasis", compressed, kfs.compress.prune, keep=0.4, basis="eigen", damping=0.01)
add("compress/low rank", compressed, kfs.compress.low_rank, keep=0.7)
add("compress/low rank cnn", compressed, kfs.compress.low_rank, "cnn", keep={"0": 0.5, "5": 0.7})


# Files and tables.


def stored(make: Callable[..., Any], model: str, **settings: Any) -> Numbers:
    """Save an operator, load it, and multiply with it."""
    K = make(RISKS[model](), **settings)
    V = vectors(K.shape[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.safetensors"
        K.save(path)
        loaded: Any = kfs.load(path, used_device())
        K.inverse(damping=0.1).save(path)
        inverse = kfs.load(path, used_device())
        return {"product": loaded @ V, "inverse": inverse @ V, "difference": (loaded @ V - K @ V).abs().max()}


def checkpointed() -> Numbers:
    """Resume from a checkpoint that was written while factors were computed."""
    with tempfile.TemporaryDirectory() as folder:
        place = kfs.Checkpoint(Path(folder) / "checkpoint", batches=1)
        kfs.KFAC(mlp_risk(), checkpoint=place)
        return factors_of(kfs.KFAC(mlp_risk(), checkpoint=place))


def inspected(model: str) -> Numbers:
    """Return sizes and costs of factors, by parameter."""
    net, sample = {
        "mlp": (mlp(), uniform(4, 3, seed=1)),
        "cnn": (cnn(), uniform(4, 2, 4, 4, seed=1)),
        "transformer": (Transformer(), uniform(4, 3, 4, seed=1)),
    }[model]
    rows = kfs.inspect(filled(net), sample).rows
    return {f"{row.parameter}": torch.tensor([float(row.nbytes), row.cost], dtype=torch.float64) for row in rows}


def compared() -> Numbers:
    """Compare structures with exact blocks."""
    rows = kfs.compare(mlp_risk()).rows
    # Errors of exact structures are round-off.
    wrong = [row for row in rows if row.frobenius > 1e-9]
    return {f"{row.layer} {row.structure}": torch.tensor([row.frobenius, row.spectral]).double() for row in wrong}


for model in ("mlp", "tokens", "tied"):
    add(f"files/KFAC/{model}", stored, kfs.KFAC, model)
add("files/EKFAC", stored, kfs.EKFAC, "cnn")
add("files/reduce", stored, kfs.KFAC, "transformer", sharing="reduce", fisher="mc")
add("files/checkpoint", checkpointed)
for model in ("mlp", "cnn", "transformer"):
    add(f"inspect/{model}", inspected, model)
add("compare/mlp", compared)


# Two processes, connected by gloo. Functions that run on ranks are pickled by name.


def on_two_ranks(function: Callable[..., Numbers], *arguments: Any) -> Numbers:
    """Run a function on two ranks, and return the results of both."""
    pool = Pool()
    try:
        found = pool(2, run_there, str(used_device()), function, *arguments)
    finally:
        pool.close()
    return {f"rank {rank}.{name}": value for rank, one in enumerate(found) for name, value in one.items()}


def run_there(device: str, function: Callable[..., Numbers], *arguments: Any) -> Numbers:
    """Run a function with models and data on a device, in a process that may be new."""
    run_on(device)
    numbers = function(*arguments)
    return {name: number.cpu() if isinstance(number, Tensor) else number for name, number in numbers.items()}


def factors_of_rank(make: str, settings: Mapping[str, Any]) -> Numbers:
    """Compute factors of data that two ranks share unevenly."""
    X, y = uniform(7, 3, seed=1), labels(3, 7, seed=2)
    own = slice(0, 4) if dist.get_rank() == 0 else slice(4, 7)
    data = split(X[own], y[own], 2)
    risk = kfs.EmpiricalRisk(filled(mlp()), nn.CrossEntropyLoss(), data, group=dist.group.WORLD)
    K = {"KFAC": kfs.KFAC, "EKFAC": kfs.EKFAC}[make](risk, **settings)
    V = vectors(K.shape[1])
    return {"product": K @ V, "inverse": K.inverse(damping=0.1) @ V, "trace": K.trace()}


def factors_of_shard() -> Numbers:
    """Compute factors and gradient of data that `kfs.shard` distributes."""
    data = split(uniform(8, 3, seed=1), labels(3, 8, seed=2), 2)
    risk = kfs.EmpiricalRisk(filled(mlp()), nn.CrossEntropyLoss(), kfs.shard(data, dist.group.WORLD))
    return {**factors_of(kfs.KFAC(risk)), **risk.gradient()}


def train_on_rank(settings: Mapping[str, Any]) -> Numbers:
    """Train with `DistributedDataParallel`, each rank on half of every batch."""
    model = filled(mlp())
    both: Any = DistributedDataParallel(model)
    half = slice(0, 4) if dist.get_rank() == 0 else slice(4, 8)
    return train(both, nn.CrossEntropyLoss(), [(x[half], y[half]) for x, y in batches()], **settings)


add("ranks/KFAC", on_two_ranks, factors_of_rank, "KFAC", {"fisher": "mc"})
add("ranks/KFAC at owners", on_two_ranks, factors_of_rank, "KFAC", {"placement": "owner"})
add("ranks/EKFAC", on_two_ranks, factors_of_rank, "EKFAC", {"sharing": "reduce"})
add("ranks/shard", on_two_ranks, factors_of_shard)
add("ranks/training", on_two_ranks, train_on_rank, {})
add("ranks/training eigen", on_two_ranks, train_on_rank, {"eigen": True, "factors_every": 2, "inverses_every": 3})
