"""Applications of curvature, measured: each application of the library, beside other libraries, in one run.

`python -m benchmarks.applications [names] [--quick]` runs the named parts, by default all of them. Each part has its
own file, which describes the measurements. `--quick` only shows that everything runs; its numbers mean nothing.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import compression, laplace, merging, pinn, pruning
from benchmarks.report import RESULTS

PARTS: dict[str, Callable[[bool, Path], None]] = {
    "compression": compression.main,
    "laplace": laplace.main,
    "merging": merging.main,
    "pinn": pinn.main,
    "pruning": pruning.main,
}


def main(arguments: list[str], results: Path = RESULTS) -> None:
    """Run the named parts, by default all of them, on one thread."""
    quick = "--quick" in arguments
    chosen = [argument for argument in arguments if argument != "--quick"] or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"Unknown: {', '.join(sorted(unknown))}. Say {', '.join(PARTS)}, and --quick if you like.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in chosen:
            PARTS[name](quick, results)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(sys.argv[1:])
