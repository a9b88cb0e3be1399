"""Makes `python -m kfs` the same as `kfs`."""

from kfs.cli import app

app(prog_name="kfs")
