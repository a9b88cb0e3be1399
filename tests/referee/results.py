"""Stored results of all configurations: their files, and comparisons with new results."""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.referee.configurations import CONFIGURATIONS

FOLDER = Path(__file__).parent / "results"
TENSORS, DIGESTS = "results.safetensors", "digests.json"
SEPARATOR = ": "  # separates the names of configuration and result


@dataclass(frozen=True)
class Difference:
    """A configuration whose results differ from the stored ones.

    Attributes:
        name: Name of the configuration.
        result: Name of the result that differs most, or another difference.
        error: Largest error, relative to the largest entry of the stored tensor.
    """

    name: str
    result: str
    error: float

    def __str__(self) -> str:
        """Return one row."""
        return f"{self.name:45s} {self.error:9.1e}  {self.result}"


def machine() -> dict[str, str]:
    """Describe the machine and the versions that the last bits of results depend on."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def _processor() -> str:
    """Return vendor, family and name of the processor, if the system reports them."""
    lines: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    known = [lines[key] for key in ("vendor_id", "cpu family", "model", "model name") if key in lines]
    return " ".join([platform.machine(), *known])


def compute(names: Iterable[str] | None = None, keeps_going: bool = False) -> dict[str, dict[str, Tensor]]:
    """Compute results of configurations; of all of them by default.

    Args:
        names: The configurations.
        keeps_going: Whether a configuration that raises an error has this error as the name of its only result.
    """
    found = {}
    for name in CONFIGURATIONS if names is None else names:
        try:
            found[name] = CONFIGURATIONS[name].compute()
        except Exception as error:
            if not keeps_going:
                raise
            found[name] = {f"{type(error).__name__}: {error!s:.300}": torch.zeros(())}
    return found


def digest(results: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes, dtypes and all bits."""
    found = hashlib.sha256()
    for name, t in sorted(results.items()):
        found.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        found.update(t.contiguous().numpy().tobytes())
    return found.hexdigest()


def store(results: Mapping[str, Mapping[str, Tensor]], folder: Path = FOLDER) -> None:
    """Write all results in float64, which is exact for float32 and small integers, and digests of original bits."""
    folder.mkdir(exist_ok=True)
    tensors = {
        name + SEPARATOR + key: t.double().contiguous() for name, one in results.items() for key, t in one.items()
    }
    save_file(tensors, folder / TENSORS)
    digests = {name: digest(one) for name, one in results.items()}
    content = {"machine": machine(), "digests": digests}
    (folder / DIGESTS).write_text(json.dumps(content, indent=1) + "\n")


def stored(folder: Path = FOLDER) -> dict[str, dict[str, Tensor]]:
    """Return stored results of all configurations."""
    found: dict[str, dict[str, Tensor]] = {}
    with safe_open(folder / TENSORS, "pt") as file:
        for full_name in file.keys():  # noqa: SIM118 (a file is not a mapping)
            name, _, key = full_name.partition(SEPARATOR)
            found.setdefault(name, {})[key] = file.get_tensor(full_name)
    return found


def is_same_machine(folder: Path = FOLDER) -> bool:
    """Whether results were stored with this processor and this version of PyTorch, so that all bits must agree."""
    content = json.loads((folder / DIGESTS).read_text())
    return bool(content["machine"] == machine())


def stored_digests(folder: Path = FOLDER) -> dict[str, str]:
    """Return digests of stored results, by configuration."""
    digests: dict[str, str] = json.loads((folder / DIGESTS).read_text())["digests"]
    return digests


def error_of(new: Tensor, old: Tensor) -> float:
    """Return the largest difference relative to the largest entry of `old`; infinity for different shapes, or NaN."""
    if new.shape != old.shape:
        return inf
    if new.numel() == 0:
        return 0.0
    difference, largest = float((new.double() - old).abs().max()), float(old.abs().max())
    if difference != difference:  # noqa: PLR0124 (NaN)
        return inf
    return difference / largest if largest > 0 else difference


def largest_difference(name: str, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Difference:
    """Return the result that differs most from the stored one."""
    if new.keys() != old.keys():
        return Difference(name, f"other names of results: {sorted(new.keys() ^ old.keys())}", inf)
    errors = {key: error_of(new[key], old[key]) for key in old}
    worst = max(errors, key=lambda key: errors[key])
    return Difference(name, worst, errors[worst])


def compare(
    results: Mapping[str, Mapping[str, Tensor]],
    old: Mapping[str, Mapping[str, Tensor]],
    digests: Mapping[str, str] | None = None,
) -> list[Difference]:
    """Compare results with stored ones.

    Args:
        results: New results by configuration.
        old: Stored results by configuration.
        digests: If given, every bit must agree. Otherwise results may differ by each configuration's tolerance.

    Returns:
        One difference for every configuration with different results.
    """
    differences = []
    for name, new in results.items():
        if name not in old:
            differences.append(Difference(name, "nothing is stored", inf))
            continue
        worst = largest_difference(name, new, old[name])
        is_same = worst.error <= CONFIGURATIONS[name].tolerance if digests is None else digest(new) == digests[name]
        if not is_same:
            differences.append(worst)
    return differences
