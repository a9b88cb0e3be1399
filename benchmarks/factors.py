"""Cost of Kronecker factors in units of forward+backward over the same data: ours, and those of installed peers.

One run measures everything in turn. `python -m benchmarks.factors` runs MLP, CNN and GPT on one CPU thread; `python
-m benchmarks.factors cuda` adds the encoder of a ViT-B/16, in float32, with TF32, and under bf16 autocast. The FLOP
column counts what our matrix products and convolutions do, relative to those of forward+backward. Memory is the peak
above what was there before, relative to that of forward+backward, with our factors taken off. Times are those of models
that were audited before; the last column has what the audit takes, once for every model and shape.
"""

import copy
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn import CrossEntropyLoss
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.factor_problems import Batches, factor_problems, vit
from benchmarks.report import RESULTS, Row, medians, write
from kfs import KFAC, EmpiricalRisk
from kfs.conformance import find
from kfs.kfac.capture import Audits, forget_audits
from kfs.kfac.rules import new_session

REPEATS = 5
PATIENCE = 20  # peers that take longer than so many forward+backwards are not measured again
ADAPTERS = ("backpack", "kronfluence", "laplace", "nngeometry")  # curvlinops has arguments of its own, below
TASKS: dict[str, dict[str, Any]] = {
    "mc expand": {"fisher": "mc", "sharing": "expand"},
    "mc reduce": {"fisher": "mc", "sharing": "reduce"},
    "empirical expand": {"fisher": "empirical", "sharing": "expand"},
    "type-2 expand": {"fisher": "type-2", "sharing": "expand"},
}


def product_flops(_: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
    """Count FLOPs of matrix products that PyTorch does not know how to count: in place, or with another result type."""
    return int(2 * prod(left) * right[-1])


PRODUCTS = dict.fromkeys((torch.ops.aten.addmm_, torch.ops.aten.addmm, torch.ops.aten.baddbmm_), product_flops)


def curvlinops_operator(problem: Batches, fisher: str, sharing: str, name: str = "KFACLinearOperator") -> Any:
    """Return curvlinops' operator before its factors are computed; nothing if it is not installed."""
    try:
        import curvlinops  # noqa: PLC0415 (a peer, not a dependency)
    except ImportError:
        return None
    kinds = curvlinops.FisherType
    kind = {"mc": kinds.MC, "empirical": kinds.EMPIRICAL, "type-2": kinds.TYPE2}[fisher]
    sharings = {"expand": curvlinops.KFACType.EXPAND, "reduce": curvlinops.KFACType.REDUCE}
    return getattr(curvlinops, name)(
        problem.model,
        CrossEntropyLoss(),
        [problem.model.get_parameter(name) for name in layers(problem)],  # others have no factors there
        problem.data,
        check_deterministic=False,
        fisher_type=kind,
        kfac_approx=sharings[sharing],
        separate_weight_and_bias=False,
        num_per_example_loss_terms=problem.terms,
        num_data=sum(len(X) for X, _ in problem.data),
    )


def curvlinops_factors(problem: Batches, fisher: str, sharing: str) -> Callable[[], object] | None:
    """Return a program that computes curvlinops' factors; nothing if it is not installed."""
    if curvlinops_operator(problem, fisher, sharing) is None:
        return None
    return lambda: curvlinops_operator(problem, fisher, sharing).compute_kronecker_factors()


def adapter_factors(problem: Batches, peer: str, fisher: str, sharing: str) -> Callable[[], object] | None:
    """Return a program that computes a peer's factors by its adapter; nothing if it is not installed or refuses."""
    model, inside = copy.deepcopy(problem.model), set(layers(problem))
    for name, p in model.named_parameters():
        p.requires_grad_(name in inside)
    try:
        program = partial(find(peer).compute, model, CrossEntropyLoss(), problem.data, fisher, sharing)
        unit, seconds = (_seconds(call) for call in (partial(forward_backward, problem), program))
    except Exception as error:  # noqa: BLE001 (whatever it is, there is nothing to measure)
        print(f"{peer}, {problem.name}, {fisher} {sharing}: {str(error).partition('.')[0]:.100}")
        return None
    if seconds > PATIENCE * unit:
        print(f"{peer}, {problem.name}, {fisher} {sharing}: {seconds / unit:.0f} forward+backwards, measured once")
        return None
    return program


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def forward_backward(problem: Batches) -> None:
    """Compute a plain gradient over all batches."""
    loss = CrossEntropyLoss()
    for X, y in problem.data:
        loss(problem.model(X), y).backward()
    problem.model.zero_grad()


def layers(problem: Batches) -> list[str]:
    """Return the parameters that all libraries cover: those of linear layers and convolutions."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    inside = {id(p) for m in problem.model.modules() if isinstance(m, kinds) for p in m.parameters()}
    return [name for name, p in problem.model.named_parameters() if id(p) in inside]


def kfs_factors(problem: Batches, params: list[str] | None = None, **settings: Any) -> KFAC:
    """Compute our factors, of all parameters by default."""
    return KFAC(EmpiricalRisk(problem.model, CrossEntropyLoss(), problem.data, params=params), **settings)


def tasks(problem: Batches) -> dict[str, dict[str, Any]]:
    """Return what is measured on a problem; with a column per class and position, type-2 is no task for the GPT."""
    return {name: setting for name, setting in TASKS.items() if name != "type-2 expand" or problem.few_columns}


def programs(problem: Batches) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return everything that is measured on a problem."""
    found: dict[tuple[str, str], Callable[[], Any]] = {
        ("forward+backward", "torch"): partial(forward_backward, problem)
    }
    for name, setting in tasks(problem).items():
        found[name, "kfs"] = partial(kfs_factors, problem, layers(problem), **setting)
        if len(layers(problem)) < len(list(problem.model.parameters())):
            found[name, "kfs, all parameters"] = partial(kfs_factors, problem, **setting)
        if problem.autocast is None:
            peers = {"curvlinops": curvlinops_factors(problem, **setting)}
            peers |= {peer: adapter_factors(problem, peer, **setting) for peer in ADAPTERS}
            found |= {(name, peer): program for peer, program in peers.items() if program is not None}
    return found


def of_eight(problem: Batches) -> Batches:
    """Return a problem with one batch of eight data."""
    X, y = problem.data[0]
    return replace(problem, data=[(X[:8], y[:8])])


def audit_seconds(problem: Batches, params: list[str] | None, repeats: int) -> float:
    """Return how long the audit of a problem's first batch takes."""
    risk = EmpiricalRisk(problem.model, CrossEntropyLoss(), problem.data, params=params)
    session = new_session(risk.params)
    batch = next(iter(risk.batches()))

    def run() -> None:
        forget_audits()
        Audits(problem.model, session).of_batch(risk, batch)

    with risk.untouched(first_order=True), torch.enable_grad():
        return medians({"audit": run}, repeats, "audit")["audit"]


def flops(program: Callable[[], object]) -> float:
    """Count the FLOPs of matrix products and convolutions."""
    with FlopCounterMode(display=False):
        program()  # hooks of the counter make it another sequence of operations, which is audited first
    with FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter:
        program()
    return float(counter.get_total_flops())


def peak_memory(program: Callable[[], object]) -> float | None:
    """Return how far memory rises while a program runs, in bytes; nothing where that cannot be measured."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        program()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # gives back what earlier programs have freed
    clear.write_text("5", encoding="utf-8")  # resets the high-water mark
    before = _kilobytes(status, "VmHWM")
    program()
    return 1024 * (_kilobytes(status, "VmHWM") - before)


def _kilobytes(status: Path, key: str) -> int:
    line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith(key))
    return int(line.split()[1])


@contextmanager
def mode(problem: Batches) -> Iterator[None]:
    """Run in a problem's precision."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = problem.tf32
    with torch.autocast("cuda", problem.autocast) if problem.autocast is not None else nullcontext():
        yield
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def measure(chosen: list[Batches], repeats: int = REPEATS) -> list[Row]:
    """Time all programs on the problems."""
    rows = []
    for problem in chosen:
        with mode(problem):
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


def main(results: Path = RESULTS, repeats: int = REPEATS, scale: int = 1, device: str = "cpu") -> None:
    """Measure on a device, and write table, JSON and plot."""
    threads = torch.get_num_threads()
    chosen = factor_problems(scale, device)
    if device == "cuda":
        chosen += vit(scale)
    else:
        torch.set_num_threads(1)
    try:
        write(measure(chosen, repeats), "factors", {"repeats": repeats, "device": device}, results)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(device=sys.argv[1] if len(sys.argv) > 1 else "cpu")
