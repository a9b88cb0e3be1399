"""Programs of the factor benchmarks: plain gradients, factors by kfs and by installed peers, audits, memory."""

import copy
import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import CrossEntropyLoss

from benchmarks.factor_problems import Batches
from benchmarks.report import medians, synchronize
from kfs import KFAC, EmpiricalRisk
from kfs.conformance import Adapter, find
from kfs.errors import ModelError
from kfs.factors.audit import Audits, forget_audits, predictor
from kfs.factors.rules import new_trace

PATIENCE = 20  # peers that take longer than this many forward+backwards are not measured again
ADAPTERS = ("backpack", "kronfluence", "laplace", "nngeometry")  # curvlinops is called with special arguments, below
TASKS: dict[str, dict[str, Any]] = {
    "mc expand": {"fisher": "mc", "sharing": "expand"},
    "mc reduce": {"fisher": "mc", "sharing": "reduce"},
    "empirical expand": {"fisher": "empirical", "sharing": "expand"},
    "type-2 expand": {"fisher": "type-2", "sharing": "expand"},
}


def curvlinops_operator(problem: Batches, fisher: str, sharing: str, name: str = "KFACLinearOperator") -> Any:
    """Return curvlinops' operator before its factors are computed; `None` if it is not installed."""
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
        [problem.model.get_parameter(name) for name in layers(problem)],  # other libraries have no factors for these
        problem.data,
        check_deterministic=False,
        fisher_type=kind,
        kfac_approx=sharings[sharing],
        separate_weight_and_bias=False,
        num_per_example_loss_terms=problem.terms,
        num_data=sum(len(X) for X, _ in problem.data),
    )


def curvlinops_factors(problem: Batches, fisher: str, sharing: str) -> Callable[[], object] | None:
    """Return a program that computes curvlinops' factors; none if it is not installed."""
    if curvlinops_operator(problem, fisher, sharing) is None:
        return None
    return lambda: curvlinops_operator(problem, fisher, sharing).compute_kronecker_factors()


@cache
def adapter(peer: str) -> Adapter | None:
    """Return a peer's adapter; if it cannot be imported, print a message, once, and return `None`."""
    try:
        return find(peer)
    except ModelError as error:
        print(f"{str(error).partition('. ')[0]}.")
        return None


def adapter_factors(problem: Batches, peer: str, fisher: str, sharing: str) -> Callable[[], object] | None:
    """Return a program that computes a peer's factors by its adapter; none if it is not installed or refuses."""
    found = adapter(peer)
    if found is None:
        return None
    model, inside = copy.deepcopy(problem.model), set(layers(problem))
    for name, p in model.named_parameters():
        p.requires_grad_(name in inside)
    try:
        program = partial(found.compute, model, CrossEntropyLoss(), problem.data, fisher, sharing)
        unit, seconds = (_seconds(call) for call in (partial(forward_backward, problem), program))
    except Exception as error:  # noqa: BLE001 (after any error, there is nothing to measure)
        print(f"{peer}, {problem.name}, {fisher} {sharing}: {str(error).partition('.')[0]:.100}")
        return None
    if seconds > PATIENCE * unit:
        print(f"{peer}, {problem.name}, {fisher} {sharing}: {seconds / unit:.0f} forward+backwards, measured once")
        return None
    return program


def _seconds(call: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def forward_backward(problem: Batches) -> None:
    """Compute a plain gradient over all batches."""
    accumulate_gradients(problem)
    problem.model.zero_grad()


def accumulate_gradients(problem: Batches) -> None:
    """Add the gradients of all batches to `grad` of the parameters."""
    loss = CrossEntropyLoss()
    for X, y in problem.data:
        with autocast(problem):  # casts of parameters are not cached over batches, as in training
            value = loss(problem.model(X), y)
        value.backward()


def layers(problem: Batches) -> list[str]:
    """Return the parameters that all libraries cover: those of linear layers and convolutions."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    inside = {id(p) for m in problem.model.modules() if isinstance(m, kinds) for p in m.parameters()}
    return [name for name, p in problem.model.named_parameters() if id(p) in inside]


def kfs_factors(problem: Batches, params: list[str] | None = None, kind: Any = KFAC, **settings: Any) -> Any:
    """Compute factors by kfs, of all parameters by default."""
    with autocast(problem):
        return kind(risk_of(problem, params), **settings)


def risk_of(problem: Batches, params: list[str] | None = None) -> EmpiricalRisk:
    """Return a problem's risk, of all parameters by default."""
    return EmpiricalRisk(problem.model, CrossEntropyLoss(), problem.data, params=params)


def tasks(problem: Batches) -> dict[str, dict[str, Any]]:
    """Return the programs for a problem; the GPT has no type-2, which needs a column per class and position."""
    return {name: setting for name, setting in TASKS.items() if name != "type-2 expand" or problem.few_columns}


def peers(problem: Batches, fisher: str, sharing: str) -> dict[str, Callable[[], object]]:
    """Return programs that compute the factors of installed peers; none under autocast."""
    if problem.autocast is not None:
        return {}
    found = {"curvlinops": curvlinops_factors(problem, fisher, sharing)}
    found |= {peer: adapter_factors(problem, peer, fisher, sharing) for peer in ADAPTERS}
    return {peer: program for peer, program in found.items() if program is not None}


def of_eight(problem: Batches) -> Batches:
    """Return a problem with one batch of eight examples."""
    X, y = problem.data[0]
    return replace(problem, data=[(X[:8], y[:8])])


def audit_seconds(problem: Batches, params: list[str] | None, repeats: int) -> float:
    """Return the time of the audit of a problem's first batch."""
    risk = risk_of(problem, params)
    trace = new_trace(risk.params)
    batch = next(iter(risk.batches()))

    def run() -> None:
        forget_audits()
        Audits(problem.model, trace).of(predictor(risk, batch), batch.x, len(batch.y))

    with autocast(problem), risk.untouched(first_order=True), torch.enable_grad():
        return medians({"audit": run}, repeats, "audit")["audit"]


def peak_memory(program: Callable[[], object]) -> float | None:
    """Return the increase of memory while a program runs, in bytes; `None` if the system does not report it."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns memory that earlier programs have freed
    clear.write_text("5", encoding="utf-8")  # resets the high-water mark
    before = _kilobytes(status, "VmHWM")
    program()
    return 1024 * (_kilobytes(status, "VmHWM") - before)


def _kilobytes(status: Path, key: str) -> int:
    line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith(key))
    return int(line.split()[1])


def autocast(problem: Batches) -> AbstractContextManager[Any]:
    """Return the autocast context of the problem."""
    device = problem.data[0][0].device.type
    return nullcontext() if problem.autocast is None else torch.autocast(device, problem.autocast)


@contextmanager
def rounding(problem: Batches) -> Iterator[None]:
    """Allow TF32 if the problem does, and not otherwise."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = problem.tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
