"""The example of the README runs as described there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = "torchrun --nproc-per-node 2 examples/many_processes.py"


def test_the_example_runs_as_it_says() -> None:
    for file in ("README.md", "docs/howto_many_processes.md", "examples/many_processes.py"):
        assert COMMAND in (ROOT / file).read_text(encoding="utf-8"), file
    # This module is `torchrun`. Other tests may run at the same time, and `--standalone` chooses a free port.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *COMMAND.split()[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Shard of rank 1 of 2: examples 50 to 100 of 101" in done.stdout
    assert "2 processes have computed the same as one process." in done.stdout
