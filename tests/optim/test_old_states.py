"""States that earlier versions have saved."""

import torch
from torch.nn import CrossEntropyLoss

from kfs.optim import KFAC
from tests.optim.training import data, mlp, train


def test_states_of_earlier_versions() -> None:
    """States without what newer versions keep can be loaded, and training goes on."""
    X, y = data(dtype=torch.float32)
    y = y % 3
    model = mlp(torch.float32)
    optimizer = KFAC(model, CrossEntropyLoss())
    train(model, optimizer, [(X, y)] * 3, CrossEntropyLoss())
    state = optimizer.state_dict()
    del state["kfac"]["curvature"]["awaited"]
    for average in state["kfac"]["curvature"]["averages"]:
        for name in ("uses", "input_size", "failed"):
            del average[name]
    again = mlp(torch.float32)
    again.load_state_dict(model.state_dict())
    other = KFAC(again, CrossEntropyLoss())
    other.load_state_dict(state)
    losses = train(again, other, [(X, y)] * 20, CrossEntropyLoss())
    assert losses[-1] < losses[0]
