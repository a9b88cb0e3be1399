"""dattri's EKFAC: linear layers alone, with labels at hand (the empirical Fisher), and without self-scores."""

import contextlib
import io

import torch
from dattri.algorithm.influence_function import IFAttributorEKFAC
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.influence_digits import Data, margins
from kfs import Relative

BATCH = 512


class Fitted:
    """EKFAC.

    Args:
        damping: What is added to eigenvalues.
        model: The model.
        data: What it was trained with.
    """

    def __init__(self, damping: float | Relative, model: nn.Module, data: Data) -> None:
        """Compute factors."""
        if isinstance(damping, Relative):
            raise NotImplementedError("dattri knows absolute damping alone.")

        def loss(params: dict[str, Tensor], batch: Data) -> Tensor:
            X, y = batch
            return cross_entropy(functional_call(model, params, (X,)), y)

        def measured(params: dict[str, Tensor], batch: Data) -> Tensor:
            X, y = batch
            return -margins(functional_call(model, params, (X,)), y).mean()

        task = AttributionTask(loss_func=loss, target_func=measured, model=model, checkpoints=model.state_dict())
        self.attributor = IFAttributorEKFAC(task=task, damping=damping)
        self.data = _loader(data)
        # Factors are those of the quantity that is measured on queries, where those of the training loss are meant.
        task.get_target_func, measuring = task.get_loss_func, task.get_target_func
        with contextlib.redirect_stderr(io.StringIO()):
            self.attributor.cache(self.data)
        task.get_target_func = measuring

    def pairwise(self, queries: Data) -> Tensor:
        """Return the score of each pair."""
        with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
            scores: Tensor = self.attributor.attribute(self.data, _loader(queries))
        return scores.T

    def own(self) -> Tensor:
        """Return the score of each training datum with itself."""
        raise NotImplementedError


def _loader(data: Data) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*data), batch_size=BATCH)
