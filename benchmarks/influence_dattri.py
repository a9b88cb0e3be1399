"""dattri's EKFAC: only linear layers, with the labels of the data (the empirical Fisher), and without self-scores."""

import contextlib
import io

import torch
from dattri.algorithm.influence_function import IFAttributorEKFAC
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import influence_methods
from benchmarks.influence_digits import Data
from benchmarks.influence_errors import DAMPING, Checked, matrices, multiplied_out
from benchmarks.influence_methods import BATCH, Quantity, gradients, losses, negative_margins
from kfs import Relative


class Fitted(influence_methods.Fitted):
    """EKFAC.

    Args:
        damping: The number that is added to eigenvalues.
        model: The model.
        data: Its training data.
        seed: Unused, since nothing is drawn.
        quantity: The quantity of queries.
    """

    def __init__(
        self, damping: float | Relative, model: nn.Module, data: Data, seed: int, quantity: Quantity = negative_margins
    ) -> None:
        if isinstance(damping, Relative):
            raise NotImplementedError("dattri knows absolute damping alone.")

        def loss(params: dict[str, Tensor], batch: Data) -> Tensor:
            X, y = batch
            return cross_entropy(functional_call(model, params, (X,)), y)

        def measured(params: dict[str, Tensor], batch: Data) -> Tensor:
            X, y = batch
            return quantity(functional_call(model, params, (X,)), y).mean()

        task = AttributionTask(loss_func=loss, target_func=measured, model=model, checkpoints=model.state_dict())
        self.attributor = IFAttributorEKFAC(task=task, damping=damping)
        self.data = _loader(data)
        # Factors are those of the quantity for queries, although those of the training loss are intended.
        task.get_target_func, measuring = task.get_loss_func, task.get_target_func
        with contextlib.redirect_stderr(io.StringIO()):
            self.attributor.cache(self.data)
        task.get_target_func = measuring

    def pairwise(self, queries: Data) -> Tensor:
        """Return the score of each pair."""
        with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
            scores: Tensor = self.attributor.attribute(self.data, _loader(queries))
        return scores.T


def _loader(data: Data) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*data), batch_size=BATCH)


def checked(model: nn.Module, data: Data, queries: Data) -> Checked:
    """Return scores of dattri in float64, and by brute force with its own basis."""
    by_layer, asked = (matrices(gradients(model, losses, one)) for one in (data, queries))
    fitted = Fitted(DAMPING, model, data, 0, losses)
    scores = fitted.pairwise(queries)
    right = []
    for layer, G in by_layer.items():
        q_a, q_s = (q.double() for q in fitted.attributor.cached_q[layer])
        eigenvalues = fitted.attributor.cached_lambdas[layer].double()
        # It multiplies with the result of `eigh` from the left, so the basis vectors are rows.
        right.append(multiplied_out(asked[layer], G, q_a.T, q_s.T, eigenvalues))
    return {"EKFAC": (scores, torch.stack(right).sum(0))}
