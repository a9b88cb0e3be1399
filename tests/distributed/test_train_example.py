"""The example of training runs as described in the book."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = "torchrun --nproc-per-node 2 examples/train_ddp.py"


def test_the_example_runs_as_it_says() -> None:
    for file in ("docs/howto_train_many_processes.md", "examples/train_ddp.py"):
        assert COMMAND in (ROOT / file).read_text(encoding="utf-8"), file
    # This module is `torchrun`. Other tests may run at the same time, and `--standalone` chooses a free port.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *COMMAND.split()[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 processes, 32 steps: loss" in done.stdout
    assert "Warning" not in done.stderr
