"""Kronfluence as in its documentation: a task with a summed loss, and an analyzer that stores results in files."""

import copy
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kronfluence
import torch
from kronfluence.utils.common.factor_arguments import smart_low_precision_factor_arguments
from kronfluence.utils.common.score_arguments import smart_low_precision_score_arguments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

from benchmarks import influence_methods
from benchmarks.influence_digits import Data
from benchmarks.influence_errors import DAMPING, Checked, matrices, multiplied_out
from benchmarks.influence_gpt import Benchmark
from benchmarks.influence_methods import BATCH, Quantity, gradients, losses, negative_margins
from benchmarks.report import synchronize
from kfs import Relative


class Task(kronfluence.Task):  # type: ignore[misc]
    """Cross-entropy for training, and a given quantity for queries.

    Args:
        measured: A function of logits `[..., classes]` and labels that is summed over queries.
        layers: Names of the layers to consider; all supported ones if it is `None`.
    """

    def __init__(self, measured: Quantity, layers: list[str] | None = None) -> None:
        self.measured = measured
        self.layers = layers

    def compute_train_loss(self, batch: Data, model: nn.Module, sample: bool = False) -> Tensor:
        """Return the sum of losses, for the labels of the data, or labels drawn from the model's distribution."""
        X, y = batch
        f = model(X)
        if sample:
            with torch.no_grad():
                y = torch.multinomial(f.flatten(0, -2).float().softmax(-1), 1).reshape(y.shape)
        return cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum")

    def compute_measurement(self, batch: Data, model: nn.Module) -> Tensor:
        """Return the sum of the measured quantity."""
        X, y = batch
        return self.measured(model(X), y).sum()

    def get_influence_tracked_modules(self) -> list[str] | None:
        """Return the layers to consider."""
        return self.layers


class Analysis:
    """A model with its training data, and Kronfluence's results for them.

    Args:
        model: The model, which Kronfluence changes.
        data: Its training data.
        task: The differentiated quantities.
        batch: The batch size.
        cpu: Whether to ignore a GPU.
    """

    def __init__(self, model: nn.Module, data: Data, task: Task, batch: int = BATCH, cpu: bool = True) -> None:
        self.files = tempfile.TemporaryDirectory()
        self.data = dataset(data)
        self.batch = batch
        self.analyzer = kronfluence.Analyzer(
            "influence",
            kronfluence.prepare_model(model, task),
            task,
            cpu=cpu,
            disable_tqdm=True,
            output_dir=self.files.name,
        )

    def covariances(self, arguments: Any, most: int | None = None, name: str = "factors") -> None:
        """Compute both factors of all layers, from all data or from a given number of them."""
        data = self.data if most is None else Subset(self.data, range(most))
        with silent():
            self.analyzer.fit_covariance_matrices(name, data, per_device_batch_size=self.batch, factor_args=arguments)

    def decompositions(self, arguments: Any) -> None:
        """Compute eigenvectors."""
        with silent():
            self.analyzer.perform_eigendecomposition("factors", arguments)

    def eigenvalues(self, arguments: Any) -> None:
        """Compute eigenvalues in the basis of these eigenvectors."""
        with silent():
            self.analyzer.fit_lambda_matrices(
                "factors", self.data, per_device_batch_size=self.batch, factor_args=arguments
            )

    def factors(self, arguments: Any) -> None:
        """Compute all results that a strategy needs."""
        with silent():
            self.analyzer.fit_all_factors("factors", self.data, per_device_batch_size=self.batch, factor_args=arguments)

    def pairwise(self, queries: Data, arguments: Any) -> Tensor:
        """Return the scores of all pairs."""
        with silent():
            self.analyzer.compute_pairwise_scores(
                "pairwise",
                "factors",
                query_dataset=dataset(queries),
                train_dataset=self.data,
                per_device_query_batch_size=min(self.batch, len(queries[1])),
                per_device_train_batch_size=self.batch,
                score_args=arguments,
                overwrite_output_dir=True,
            )
            scores: Tensor = self.analyzer.load_pairwise_scores("pairwise")["all_modules"]
        return scores

    def own(self, arguments: Any) -> Tensor:
        """Return self-scores of training data."""
        with silent():
            self.analyzer.compute_self_scores(
                "own",
                "factors",
                train_dataset=self.data,
                per_device_train_batch_size=self.batch,
                score_args=arguments,
                overwrite_output_dir=True,
            )
            scores: Tensor = self.analyzer.load_self_scores("own")["all_modules"]
        return scores


class Fitted(influence_methods.Fitted):
    """EKFAC with one drawn label for each example, which is Kronfluence's default.

    Args:
        damping: The number that is added to eigenvalues; the only supported multiple of the mean eigenvalue is 0.1.
        model: The model, which Kronfluence changes.
        data: Its training data.
        seed: Seed of draws.
    """

    def __init__(self, damping: float | Relative, model: nn.Module, data: Data, seed: int) -> None:
        if isinstance(damping, Relative) and damping.fraction != 0.1:
            raise NotImplementedError("Kronfluence knows 0.1 times the mean eigenvalue alone.")
        self.arguments = kronfluence.ScoreArguments(damping_factor=None if isinstance(damping, Relative) else damping)
        torch.manual_seed(seed)
        self.analysis = Analysis(model, data, Task(negative_margins))
        self.analysis.factors(kronfluence.FactorArguments(strategy="ekfac"))

    def pairwise(self, queries: Data) -> Tensor:
        """Return the score of each pair."""
        return self.analysis.pairwise(queries, self.arguments)

    def own(self) -> Tensor:
        """Return the self-score of each training example."""
        return self.analysis.own(self.arguments)


def dataset(data: Data) -> TensorDataset:
    """Return data in the form that Kronfluence needs: on the CPU. It moves every batch to the model."""
    return TensorDataset(*(part.cpu() for part in data))


@contextmanager
def silent() -> Iterator[None]:
    """Suppress Kronfluence's log messages."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def checked(model: nn.Module, data: Data, queries: Data) -> Checked:
    """Return inner products and scores of Kronfluence in float64, and by brute force."""
    by_layer, asked = (matrices(gradients(model, losses, one)) for one in (data, queries))
    precise = dict.fromkeys(("per_sample_gradient_dtype", "precondition_dtype", "score_dtype"), torch.float64)
    in_factors = ("activation_covariance_dtype", "gradient_covariance_dtype", "per_sample_gradient_dtype")
    factors = dict.fromkeys((*in_factors, "lambda_dtype"), torch.float64)

    def found(strategy: str) -> tuple[Tensor, Analysis]:
        analysis = Analysis(copy.deepcopy(model), data, Task(losses))
        analysis.factors(kronfluence.FactorArguments(strategy=strategy, use_empirical_fisher=True, **factors))
        return analysis.pairwise(queries, kronfluence.ScoreArguments(damping_factor=DAMPING, **precise)), analysis

    plain, _ = found("identity")
    scores, analysis = found("ekfac")
    parts = analysis.analyzer.load_all_factors("factors")
    right = [
        multiplied_out(
            asked[layer],
            G,
            parts["activation_eigenvectors"][layer].double(),
            parts["gradient_eigenvectors"][layer].double(),
            parts["lambda_matrix"][layer].double() / float(parts["num_lambda_processed"][layer]),
        )
        for layer, G in by_layer.items()
    ]
    inner = [asked[layer].flatten(1) @ G.flatten(1).T for layer, G in by_layer.items()]
    return {
        "inner products": (plain, torch.stack(inner).sum(0)),
        "EKFAC": (scores, torch.stack(right).sum(0)),
    }


class Language:
    """Measurements of Kronfluence for a language model; see `benchmarks/influence_gpt.py`.

    Args:
        benchmark: Model and data.
        layers: The layers to consider.
        low: Whether gradients, factors and scores are in bf16, too.
    """

    def __init__(self, benchmark: Benchmark, layers: list[str], low: bool) -> None:
        """Prepare a copy of the model."""
        cuda = torch.device(benchmark.size.device).type == "cuda"
        task = Task(lambda f, y: cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum"), layers)
        self.analysis = Analysis(
            copy.deepcopy(benchmark.model), benchmark.train, task, benchmark.size.batch, cpu=not cuda
        )
        self.queries = benchmark.queries
        if low:
            self.of_factors = smart_low_precision_factor_arguments()
            self.of_scores = smart_low_precision_score_arguments(damping_factor=None)
        else:
            precision = torch.bfloat16 if cuda else None
            self.of_factors = kronfluence.FactorArguments(amp_dtype=precision)
            self.of_scores = kronfluence.ScoreArguments(damping_factor=None, amp_dtype=precision)
        self.of_factors.use_empirical_fisher = benchmark.size.fisher == "empirical"
        self.passes = 0.0

    def first_batch(self) -> None:
        """Compute covariances of one batch."""
        self.analysis.covariances(self.of_factors, self.analysis.batch, "first batch")

    def factors(self) -> None:
        """Compute covariances, eigenvectors and eigenvalues."""
        start = time.perf_counter()
        self.analysis.covariances(self.of_factors)
        synchronize()
        self.passes = time.perf_counter() - start
        self.analysis.decompositions(self.of_factors)
        synchronize()
        start = time.perf_counter()
        self.analysis.eigenvalues(self.of_factors)
        synchronize()
        self.passes += time.perf_counter() - start

    def without_decompositions(self, seconds: float) -> float:
        """Return the time of the passes."""
        return self.passes

    def pairwise(self) -> Tensor:
        """Compute scores of all pairs."""
        return self.analysis.pairwise(self.queries, self.of_scores)

    def own(self) -> Tensor:
        """Compute self-scores."""
        return self.analysis.own(self.of_scores)
