"""The example of the README runs, as it is said there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = "torchrun --nproc-per-node 2 examples/many_processes.py"


def test_the_example_runs_as_it_says() -> None:
    for file in ("README.md", "docs/howto_many_processes.md", "examples/many_processes.py"):
        assert COMMAND in (ROOT / file).read_text(encoding="utf-8"), file
    # `torchrun` is this module. A free port is chosen, since others may run tests at the same time.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-port", "0"]
    done = subprocess.run([*torchrun, *COMMAND.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Shard of rank 1 of 2: data 50 to 100 of 101" in done.stdout
    assert "2 processes have computed what one does." in done.stdout
