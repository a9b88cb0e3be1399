"""Curvature of data that are split over processes equals the curvature in one process.

Run `torchrun --nproc-per-node 2 examples/many_processes.py`, with any number of processes. They use GPUs if there is
one per process, and otherwise the CPU.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kfs


def main(device: torch.device) -> None:
    """Compute EKFAC, scores and a product with the Hessian on all processes, and compare them with one process."""
    # Every process makes the same model and the same data set, but loads only its own part of the data.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double().to(device)
    dataset = TensorDataset(torch.randn(101, 8, dtype=torch.float64), torch.randint(3, (101,)))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    loss = nn.CrossEntropyLoss()

    part = kfs.shard(loader, dist.group.WORLD)
    print(part)
    risk = kfs.EmpiricalRisk(model, loss, part)  # gets the group from its data
    E = kfs.EKFAC(risk, fisher="mc")
    step = E.inverse(damping=kfs.Relative(0.1)) @ risk.gradient()
    Hv = kfs.Hessian(risk) @ step
    queries = kfs.EmpiricalRisk(model, loss, dataset[:4])
    scores = kfs.Influence(E).scores(queries, risk)  # with all 101 training data, on every process

    if dist.get_rank() == 0:
        print(E)
        alone = kfs.EmpiricalRisk(model, loss, loader)
        one = kfs.EKFAC(alone, fisher="mc")
        expected = kfs.Hessian(alone) @ (one.inverse(damping=kfs.Relative(0.1)) @ alone.gradient())
        for name in step:
            torch.testing.assert_close(Hv[name], expected[name], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(scores, kfs.Influence(one).scores(queries, alone), rtol=1e-8, atol=1e-8)
        print(f"{dist.get_world_size()} processes have computed the same as one process.")


if __name__ == "__main__":
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    own_device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(own_device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        main(own_device)
    finally:
        dist.destroy_process_group()
