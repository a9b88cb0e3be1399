"""Where strips beat one product for X^T X: the measurement behind the numbers in `kfs/kfac/sums/gram.py`."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.report import medians

SIZES = {"cpu": ((512, 1024), (1024, 256), (4096, 512)), "cuda": ((12608, 768), (12608, 2304), (12608, 3072))}


def strips(total: Tensor, x: Tensor, width: int) -> None:
    """Add a product, strip by strip."""
    for start in range(0, len(total), width):
        out = total[start : start + width, start:]
        if x.dtype == total.dtype:
            out.addmm_(x[:, start : start + width].T, x[:, start:])
        else:
            out += torch.mm(x[:, start : start + width].T, x[:, start:], out_dtype=total.dtype)


def main(device: str = "cpu") -> None:
    """Print milliseconds for several widths of strips; the last one is a single product."""
    kinds = [torch.float32] if device == "cpu" else [torch.float32, torch.bfloat16]
    for positions, size in SIZES[device]:
        for dtype in kinds:
            x = torch.randn(positions, size, device=device, dtype=dtype)
            total = torch.zeros(size, size, device=device)

            def program(width: int, total: Tensor = total, x: Tensor = x) -> Callable[[], None]:
                return lambda: strips(total, x, width)

            widths = [w for w in (64, 96, 128, 256, 384, 512, 768, 1024, 1536) if w < size] + [size]
            times = medians({w: program(w) for w in widths}, 9, "gram")
            print(positions, size, dtype, {w: round(1e3 * t, 3) for w, t in times.items()})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
