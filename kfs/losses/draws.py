r"""Counter-based random numbers: each number depends on its index, not on the order of draws.

Entry $e$ of draw $m$ for example $n$ is a pure function of $(\mathrm{seed}, n, m, e)$. It is the same for every batch
size, order, device and number of processes. The function is Threefry-2x32 with 20 rounds (Salmon et al., 2011), a keyed
bijection of 64-bit counters in integer arithmetic. It is implemented with NumPy for a CPU, with tensor operations for
other devices, and as a single kernel for computations that are recorded on a GPU. Words and uniform numbers are
bitwise equal everywhere; normal numbers are equal up to the rounding of logarithm and cosine in float64 on a device.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from math import pi, prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kfs.runtime import sync

_MASK = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


# Number of counters for which words are computed at a time.
_BLOCK = 2**13
# For at most this many counters, words are computed on the host and copied to an accelerator. This takes less time than
# launching a hundred operations.
_FEW = 2**14
Words = TypeVar("Words", int, Tensor)


def threefry(key: tuple[int, int], x0: Words, x1: Words) -> tuple[Words, Words]:
    """Return a pseudo-random pair of 32-bit words for each counter under a key.

    Args:
        key: Two words, each from 0 to 2**32 - 1.
        x0: First words of the counters: an integer or an int64 tensor with values from 0 to 2**32 - 1.
        x1: Second words of the counters, in the same form.

    Returns:
        Two integers or int64 tensors with values from 0 to 2**32 - 1.

    Example:
        >>> [hex(word) for word in threefry((0, 0), 0, 0)]
        ['0x6b200159', '0x99ba4efe']
    """
    keys = _schedule(key)
    x0, x1 = (x0 + keys[0]) & _MASK, (x1 + keys[1]) & _MASK
    for block in range(5):
        for rotation in _ROTATIONS[:4] if block % 2 == 0 else _ROTATIONS[4:]:
            x0 = (x0 + x1) & _MASK
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) & _MASK
            x1 = x1 ^ x0
        x0 = (x0 + keys[(block + 1) % 3]) & _MASK
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & _MASK
    return x0, x1


def threefry_in_place(key: tuple[int, int], x0: npt.NDArray[np.uint32], x1: npt.NDArray[np.uint32]) -> None:
    """Compute `threefry` in place on NumPy arrays, which have less overhead per operation than tensors."""
    keys = [np.uint32(word) for word in _schedule(key)]
    x0 += keys[0]
    x1 += keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[:4] if block % 2 == 0 else _ROTATIONS[4:]:
            x0 += x1
            high = x1 >> (32 - rotation)
            x1 <<= rotation
            x1 |= high
            x1 ^= x0
        x0 += keys[(block + 1) % 3]
        x1 += keys[(block + 2) % 3]
        x1 += np.uint32(block + 1)


def _schedule(key: tuple[int, int]) -> tuple[int, int, int]:
    return *key, key[0] ^ key[1] ^ _PARITY


# Computes both words of one counter. Arithmetic of 32-bit unsigned integers in C++ is modulo 2**32.
_KERNEL = """
template <typename T>
void threefry(T counter0, T counter1, T key0, T key1, T& word0, T& word1) {
    unsigned int keys[3] = {(unsigned int)key0, (unsigned int)key1, (unsigned int)key0 ^ (unsigned int)key1 ^ PARITYu};
    unsigned int rotations[8] = {ROTATIONS};
    unsigned int x0 = (unsigned int)counter0 + keys[0];
    unsigned int x1 = (unsigned int)counter1 + keys[1];
    #pragma unroll
    for (int round = 0; round < 20; ++round) {
        unsigned int rotation = rotations[round % 8];
        x0 += x1;
        x1 = (x1 << rotation) | (x1 >> (32 - rotation));
        x1 ^= x0;
        if (round % 4 == 3) {
            int block = round / 4 + 1;
            x0 += keys[block % 3];
            x1 += keys[(block + 1) % 3] + block;
        }
    }
    word0 = x0;
    word1 = x1;
}
"""


@cache
def _gpu_kernel() -> Any:  # pragma: no cover (tested on a GPU)
    """Compile `threefry` for a GPU, which takes a second; PyTorch caches the kernel."""
    code = _KERNEL.replace("PARITY", str(_PARITY)).replace("ROTATIONS", ", ".join(map(str, _ROTATIONS)))
    return torch.cuda.jiterator._create_multi_output_jit_fn(code, num_outputs=2, key0=0, key1=0)


def _scrambled(key: tuple[int, int], x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Broadcast counters and compute `threefry`, using a single kernel on a GPU."""
    x0, x1 = torch.broadcast_tensors(x0, x1)
    if x0.is_cuda:  # pragma: no cover (tested on a GPU)
        try:
            # Contiguous tensors, since each memory layout needs its own kernel.
            w0, w1 = _gpu_kernel()(x0.contiguous(), x1.contiguous(), key0=key[0], key1=key[1])
        except RuntimeError as error:
            if "nvrtc" not in str(error).lower():
                raise
        else:
            return w0, w1
    return threefry(key, x0, x1)


def _scrambled_by_operations(key: tuple[int, int], x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Broadcast counters and compute `threefry`, using tensor operations."""
    return threefry(key, *torch.broadcast_tensors(x0, x1))


@cache
def _key_of(seed: int, sample: int) -> tuple[int, int]:
    """Return the key for one Monte Carlo sample."""
    return threefry((seed & _MASK, seed >> 32), sample >> 32, sample & _MASK)


@lru_cache(maxsize=32)
def _block_of_words(key: tuple[int, int], block: int, num_data: int, entries: int) -> npt.NDArray[np.int64]:
    """Return the words of a block of consecutive examples, `[2, num_data, entries]`."""
    words = np.empty((2, num_data, entries), dtype=np.uint32)
    words[0] = np.arange(block * num_data, (block + 1) * num_data)[:, None]
    words[1] = np.arange(entries)
    threefry_in_place(key, *words)
    return words.astype(np.int64)


@dataclass(frozen=True)
class Draws:
    """Random numbers for consecutive examples of a data set.

    Attributes:
        seed: Seed from 0 to 2**64 - 1. Equal seeds give equal numbers.
        first: Index of the first example within the data set: an integer, or a zero-dimensional tensor on the device of
            the draws, so that replays of a CUDA graph can change it and draw different numbers.
        sample: Index of the Monte Carlo sample.
    """

    seed: int
    first: int | Tensor
    sample: int

    def uniform(self, num_data: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw uniform numbers strictly between 0 and 1, float64, shape `[num_data, *shape]`."""
        w0, w1 = self._words(num_data, shape, device)
        return (((w0 << 20) + (w1 >> 12)).double() + 0.5) * 2.0**-52

    def normal(self, num_data: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw standard normal numbers, float64, shape `[num_data, *shape]` (Box-Muller)."""
        w0, w1 = self._words(num_data, shape, device)
        radius, angle = (w0.double() + 0.5) * 2.0**-32, w1.double() * (2 * pi * 2.0**-32)
        return torch.sqrt(-2 * torch.log(radius)) * torch.cos(angle)

    def _words(self, num_data: int, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return two int64 tensors `[num_data, *shape]` of independent uniform 32-bit words.

        This takes about a hundred integer operations. On the host, they run for blocks of many examples, and blocks are
        cached for small batches.
        """
        key, entries = _key_of(self.seed, self.sample), prod(shape)
        at_a_time = _BLOCK // max(entries, 1)
        first = self.first
        on_device = sync.is_asynchronous(device)
        fits = at_a_time and num_data and (not on_device or num_data * entries <= _FEW)
        # On the host, slice cached blocks of words.
        if fits and isinstance(first, int) and first + num_data <= _MASK:
            start, stop = first // at_a_time, first + num_data
            blocks = [_block_of_words(key, block, at_a_time, entries) for block in range(start, -(-stop // at_a_time))]
            words = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
            offset = first - start * at_a_time
            mine = words[:, offset : offset + num_data]
            w0, w1 = (torch.from_numpy(word).to(device, non_blocking=on_device) for word in mine)
        else:
            example = (sync.counting(num_data, device) + first).unsqueeze(1)
            entry = sync.counting(entries, device).unsqueeze(0)
            # Compiling a kernel pays off only for a recorded computation, which is replayed many times.
            scramble = _scrambled if isinstance(first, Tensor) else _scrambled_by_operations
            w0, w1 = scramble(key, example, entry)
        return w0.reshape(num_data, *shape), w1.reshape(num_data, *shape)
