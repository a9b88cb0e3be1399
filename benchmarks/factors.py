"""Cost of Kronecker factors in units of forward+backward over the same data: by kfs, and by installed peers.

One run measures everything in turn. `python -m benchmarks.factors` runs MLP, CNN and GPT on one CPU thread. `python -m
benchmarks.factors cuda` adds the encoder of a ViT-B/16, and has other columns, explained in
`benchmarks/replayed_factors.py`. Further words choose problems by the beginning of their names: `python -m
benchmarks.factors cuda ViT MLP`.

The FLOP column counts our matrix products and convolutions, relative to those of forward+backward. Memory is the peak
in addition to the memory at the start, relative to that of forward+backward, without our factors. Times are those of
models that were audited before; the last column has the time of the audit, once for every model and shape.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import replayed_factors
from benchmarks.factor_problems import Batches, factor_problems, vit
from benchmarks.factor_programs import (
    audit_seconds,
    forward_backward,
    kfs_factors,
    layers,
    of_eight,
    peak_memory,
    peers,
    tasks,
)
from benchmarks.report import RESULTS, Row, medians, write

REPEATS = 5


def product_flops(_: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
    """Count FLOPs of matrix products that PyTorch does not count: in place, or with another result type."""
    return int(2 * prod(left) * right[-1])


PRODUCTS = dict.fromkeys((torch.ops.aten.addmm_, torch.ops.aten.addmm, torch.ops.aten.baddbmm_), product_flops)


def programs(problem: Batches) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return all programs to measure on a problem."""
    found: dict[tuple[str, str], Callable[[], Any]] = {
        ("forward+backward", "torch"): partial(forward_backward, problem)
    }
    for name, setting in tasks(problem).items():
        found[name, "kfs"] = partial(kfs_factors, problem, layers(problem), **setting)
        if len(layers(problem)) < len(list(problem.model.parameters())):
            found[name, "kfs, all parameters"] = partial(kfs_factors, problem, **setting)
        found |= {(name, peer): program for peer, program in peers(problem, **setting).items()}
    return found


def flops(program: Callable[[], object]) -> float:
    """Count the FLOPs of matrix products and convolutions."""
    with FlopCounterMode(display=False):
        program()  # hooks of the counter change the sequence of operations, which is audited first
    with FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter:
        program()
    return float(counter.get_total_flops())


def measure(chosen: list[Batches], repeats: int = REPEATS) -> list[Row]:
    """Time all programs on the problems."""
    rows = []
    for problem in chosen:
        found = programs(problem)
        seconds = medians(found, repeats, problem.name)
        unit = "forward+backward", "torch"
        memory = {key: peak_memory(program) for key, program in found.items()}
        counts = {key: flops(program) for key, program in found.items() if key[1].startswith(("kfs", "torch"))}
        chosen_params = {"kfs": layers(problem), "kfs, all parameters": None}
        audits = {library: audit_seconds(problem, params, repeats) for library, params in chosen_params.items()}
        for key, value in seconds.items():
            factors = 0
            if "kfs" in key[1]:
                K = found[key]()
                factors = sum(block.nbytes for block in K.blocks.values())
                del K
            peak, base = memory[key], memory[unit]
            memory_ratio = (peak - factors) / base if peak and base else None
            flop_ratio = counts[key] / counts[unit] if key in counts else None
            program, library = key
            audit = None
            if library in audits:
                eight = partial(kfs_factors, of_eight(problem), chosen_params[library], **tasks(problem)[program])
                audit = audits[library] / medians({"eight": eight}, repeats, "eight data")["eight"]
            ratio = value / seconds[unit]
            rows.append(Row(problem.name, program, library, value, ratio, flop_ratio, memory_ratio, audit))
    return rows


def main(
    results: Path = RESULTS,
    repeats: int | None = None,
    scale: int = 1,
    device: str = "cpu",
    names: Sequence[str] = (),
) -> None:
    """Measure problems on a device, chosen by the beginnings of their names, and write table, JSON and plot."""
    threads = torch.get_num_threads()
    chosen = factor_problems(scale, device)
    if device == "cuda":
        chosen += vit(scale)
    known = [problem.name for problem in chosen]
    chosen = [problem for problem in chosen if not names or problem.name.startswith(tuple(names))]
    if not chosen:
        raise SystemExit(f"No problem's name begins with one of {list(names)}: choose from {known}.")
    if device == "cuda":
        replayed_factors.main(chosen, results, repeats or replayed_factors.REPEATS)
        return
    repeats = repeats or REPEATS
    torch.set_num_threads(1)
    try:
        write(measure(chosen, repeats), "factors", {"repeats": repeats, "device": device}, results)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.factors")
    parser.add_argument("device", nargs="?", default="cpu", help="cpu or cuda")
    parser.add_argument("names", nargs="*", help="beginnings of the names of problems; all of them if not given")
    parser.add_argument("--repeats", type=int, help="how often to time everything")
    given = parser.parse_args()
    main(repeats=given.repeats, device=given.device, names=given.names)
