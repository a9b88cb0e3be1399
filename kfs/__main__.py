"""Makes `python -m kfs` the same as `kfs`."""

from kfs.cli import app

if __name__ == "__main__":
    app(prog_name="kfs")
