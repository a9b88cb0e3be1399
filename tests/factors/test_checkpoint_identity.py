"""A checkpoint belongs to its settings, model, values and data; others are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import ModelError, StorageError
from kfs.factors import EKFAC, KFAC
from kfs.losses import Custom
from kfs.problem.risk import EmpiricalRisk
from tests.factors.test_checkpoint import Batches, compute, model


def test_what_belongs_to_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    compute(KFAC, path, Batches())
    with pytest.raises(StorageError, match="another computation: settings differ"):
        compute(KFAC, path, Batches(), fisher="mc")
    with pytest.raises(StorageError, match="The data differ"):
        compute(KFAC, path, Batches(shift=1e-3))
    with pytest.raises(StorageError, match="The data differ"):
        compute(KFAC, path, Batches(number=5))
    other = model()
    with torch.no_grad():
        other[0].bias += 1  # type: ignore[index]
        other[5].running_mean += 1  # type: ignore[index]
    with pytest.raises(StorageError, match="values of parameters, values of other parameters and buffers differ"):
        KFAC(EmpiricalRisk(other, nn.MSELoss(), Batches()), checkpoint=path)
    with pytest.raises(StorageError, match="loss differ"):
        KFAC(EmpiricalRisk(model(), nn.MSELoss(reduction="sum"), Batches()), checkpoint=path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="damaged"):
        compute(KFAC, path, Batches())


def test_whatever_changes_the_result_is_noticed(tmp_path: Path) -> None:
    X, y = torch.randn(6, 3), torch.randint(2, (6,))

    def net(activation: nn.Module, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2))

    def run(model: nn.Module, loss: nn.Module, data: Any = (X, y), **settings: Any) -> KFAC | EKFAC:
        return KFAC(
            EmpiricalRisk(model, loss, data, params=["2.weight", "2.bias"]), checkpoint=tmp_path / "c", **settings
        )

    run(net(nn.Tanh()), nn.CrossEntropyLoss())
    frozen = net(nn.Tanh())
    with torch.no_grad():
        frozen[0].weight += 1  # type: ignore[index]
    for changed, loss, words in (
        (net(nn.ReLU()), nn.CrossEntropyLoss(), "model differ"),
        (frozen, nn.CrossEntropyLoss(), "values of other parameters"),
        (net(nn.Tanh()), nn.CrossEntropyLoss(label_smoothing=0.1), "loss differ"),
        (net(nn.Tanh()), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), "loss differ"),
    ):
        with pytest.raises(StorageError, match=words):
            run(changed, loss)
    run(net(nn.Tanh()), nn.CrossEntropyLoss())

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, k: float) -> Tensor:
            result: Tensor = self.layer(k * x)
            return result

    scaled = Scaled()
    for k in (1.0, 1.0, 2.0):
        risk = EmpiricalRisk(scaled, nn.CrossEntropyLoss(), [{"x": X, "k": k, "labels": y}])
        if k == 1.0:
            KFAC(risk, checkpoint=tmp_path / "k")
        else:
            with pytest.raises(StorageError, match="The data differ"):
                KFAC(risk, checkpoint=tmp_path / "k")


def test_eigenvalues_belong_to_their_eigenvectors(tmp_path: Path) -> None:
    compute(EKFAC, tmp_path / "c", Batches(number=7))
    with pytest.raises(StorageError, match="eigenvectors differ"):
        compute(EKFAC, tmp_path / "c", Batches())


def test_where_things_are_in_memory_does_not_matter(tmp_path: Path) -> None:
    """A batch with an object whose `repr` contains its address is the same batch in the next process."""

    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: Scale) -> Tensor:  # type: ignore[override]
            return super().forward(scale.factor * x)

    net, X, y = Scaled(3, 2), torch.randn(6, 3), torch.randn(6, 2)
    scales = [Scale(2.0) for _ in range(2)]
    assert repr(scales[0]) != repr(scales[1])
    for scale in scales:
        risk = EmpiricalRisk(net, nn.MSELoss(), [{"input": X, "scale": scale, "labels": y}], unpack=unpack)
        K = KFAC(risk, checkpoint=tmp_path / "c")
    inputs = torch.cat([2 * X, torch.ones(6, 1)], 1)
    torch.testing.assert_close(K.blocks["weight"].A, 2 / 12 * inputs.T @ inputs)


def unpack(batch: Any) -> tuple[Any, Tensor]:
    return {"x": batch["input"], "scale": batch["scale"]}, batch["labels"]


def test_precision_is_part_of_what_a_checkpoint_belongs_to(tmp_path: Path) -> None:
    """Zeros have the same bytes in both half precisions."""

    def run(dtype: torch.dtype) -> KFAC:
        net = nn.Linear(3, 2).to(dtype)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        data = torch.zeros(4, 3, dtype=dtype), torch.zeros(4, 2, dtype=dtype)
        return KFAC(EmpiricalRisk(net, nn.MSELoss(), data), checkpoint=tmp_path / "c")

    run(torch.float16)
    with pytest.raises(StorageError, match="another computation: precision differ"):
        run(torch.bfloat16)
    run(torch.float16)


def test_losses_that_are_functions(tmp_path: Path) -> None:
    def risk(number: float) -> EmpiricalRisk:
        loss = Custom(lambda f, y: number * (f - y).square().sum())
        torch.manual_seed(0)
        return EmpiricalRisk(nn.Linear(2, 1), loss, (torch.randn(4, 2), torch.randn(4, 1)))

    K = KFAC(risk(1.0), "empirical", checkpoint=tmp_path / "run")
    KFAC(risk(1.0), "empirical", checkpoint=tmp_path / "run")
    with pytest.raises(StorageError, match="another computation: loss differ"):
        KFAC(risk(2.0), "empirical", checkpoint=tmp_path / "run")
    with pytest.raises(ModelError, match="loss"):
        K.merge(KFAC(risk(2.0), "empirical"))
