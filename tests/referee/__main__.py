"""Store results of all configurations, or compare with them.

    python -m tests.referee store
    python -m tests.referee compare [--tolerant | --cuda] [names]

A name stands for all configurations that begin with it. `compare` exits with 1 if there is a difference. With the
processor and version of PyTorch of the stored results, every bit must agree; otherwise, or with `--tolerant`, numbers
may differ by the tolerance of their configuration. With `--cuda`, configurations run on a GPU, and results must agree
with the stored ones of a CPU in the same way. Those that cannot, such as random samples, are left out (`NOT_ON_A_GPU`).
"""

import sys
import time
from collections.abc import Sequence

import torch

from tests.referee.configurations import CONFIGURATIONS, NOT_ON_A_GPU
from tests.referee.models import run_on
from tests.referee.results import FOLDER, compare, compute, is_same_machine, store, stored, stored_digests


def chosen(beginnings: Sequence[str]) -> list[str]:
    """Return the names of configurations that begin with one of these names; all of them without names.

    Raises:
        SystemExit: If no configuration begins with a name.
    """
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in CONFIGURATIONS):
            raise SystemExit(f"No configuration begins with {beginning!r}.")
    return [name for name in CONFIGURATIONS if not beginnings or name.startswith(tuple(beginnings))]


def main(arguments: Sequence[str]) -> int:
    """Run a command, and return the exit status."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    match list(arguments):
        case ["store"]:
            store(compute())
            size = sum(file.stat().st_size for file in FOLDER.iterdir())
            print(f"{len(CONFIGURATIONS)} configurations, {size:,} bytes, {time.perf_counter() - start:.0f} s")
            return 0
        case ["compare", *rest]:
            names = chosen([one for one in rest if one not in {"--tolerant", "--cuda"}])
            bitwise = is_same_machine() and not {"--tolerant", "--cuda"} & set(rest)
            if "--cuda" in rest:
                run_on("cuda")
                names = [name for name in names if name not in NOT_ON_A_GPU]
            differences = compare(compute(names, keeps_going=True), stored(), stored_digests() if bitwise else None)
            for difference in differences:
                print(difference)
            how = "bit for bit" if bitwise else "within tolerances"
            found = f"{len(differences)} of {len(names)} configurations differ"
            print(f"{found} ({how}, {time.perf_counter() - start:.0f} s)")
            return 1 if differences else 0
        case _:
            print(__doc__)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
