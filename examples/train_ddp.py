"""Natural gradient descent on several processes, with `DistributedDataParallel`.

Run `torchrun --nproc-per-node 2 examples/train_ddp.py`, with any number of processes. They use GPUs if there is one per
process, and otherwise the CPU.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kfs.optim import KFAC

BATCH = 128  # examples of all processes in a step


def train(model: nn.Module, optimizer: KFAC, loader: DataLoader[tuple[torch.Tensor, ...]], epochs: int) -> float:
    """Train as with any other optimizer, and return the last loss of this process."""
    device = next(model.parameters()).device
    criterion = nn.CrossEntropyLoss()
    value = torch.zeros(())
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            value = criterion(model(inputs.to(device)), labels.to(device))
            value.backward()
            optimizer.step()
    return float(value.detach())


def main(device: torch.device, file: Path) -> None:
    """Train, save on rank 0, and resume on all ranks."""
    torch.manual_seed(0)
    X = torch.randn(1024, 20)
    data = TensorDataset(X, (X @ torch.randn(20, 5)).argmax(dim=1))
    loader = DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=DistributedSampler(data))

    network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
    model = DistributedDataParallel(network)
    optimizer = KFAC(model, nn.CrossEntropyLoss())  # gets the processes from the model
    first = train(model, optimizer, loader, epochs=2)

    optimizer.consolidate_state_dict()  # in all processes
    if dist.get_rank() == 0:
        torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
    dist.barrier()
    state = torch.load(file, weights_only=True)
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])  # in all processes; there may be more or fewer than before

    last = train(model, optimizer, loader, epochs=2)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {optimizer.steps} steps: loss {first:.2f}, then {last:.2f}.")


if __name__ == "__main__":
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    own_device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(own_device)
    # With gloo for the CPU, messages between hosts do not synchronize with GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    try:
        with tempfile.TemporaryDirectory() as folder:
            names: list[str | None] = [folder]
            dist.broadcast_object_list(names)
            main(own_device, Path(names[0] or folder) / "training.pt")
            dist.barrier()
    finally:
        dist.destroy_process_group()
