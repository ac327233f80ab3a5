"""Counter-based random numbers for lanes: a pure function of a lane's key and its own counter.

A generator with a hidden state would tie a chain's numbers to how far the others have come. Here
the k-th momentum of a chain depends on its seed and on k alone, on any device, in any batch.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["both", "lane_keys", "normals", "threefry", "uniforms"]

_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def lane_keys(seed: int, lanes: list[int]) -> Tensor:
    """Return the keys of lanes: `(lanes, 4)` words of 32 bits, two for normals, two for uniforms.

    Args:
        seed: Seed of the run.
        lanes: Number of each lane in its run; a lane's key does not depend on the others.
    """
    words = [np.random.SeedSequence(seed, spawn_key=(n,)).generate_state(4) for n in lanes]
    return torch.from_numpy(np.stack(words).astype(np.int64))


def threefry(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor], *, hold: bool = False
) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, §4), on words held in int64.

    Args:
        key: Two words that broadcast with the counter.
        counter: Two words.
        hold: Whether inductor shall keep the words of each second round in memory. It writes out an
            expression again for each of its readers, and here each round reads the last one twice.

    Returns:
        Two words of the broadcast shape, uniform on 0 … 2³² − 1.
    """
    # Words of 32 bits in 64: torch has no arithmetic on unsigned words on every device.
    schedule = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (counter[0] + schedule[0]) & _WORD, (counter[1] + schedule[1]) & _WORD
    for block in range(5):
        for place, rotation in enumerate(_ROTATIONS[block % 2]):
            a = (a + b) & _WORD
            b = a ^ (((b << rotation) | (b >> (32 - rotation))) & _WORD)
            if hold and place % 2:
                a, b = _held(a), _held(b)
        a = (a + schedule[(block + 1) % 3]) & _WORD
        b = (b + schedule[(block + 2) % 3] + (block + 1)) & _WORD
    return a, b


def _held(value: Tensor) -> Tensor:
    """Return the value itself; inductor can give it these strides only if it stores it."""
    return value.as_strided(value.shape, value.stride())


def normals(keys: Tensor, counter: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return vector number `counter` of each lane's standard Normal vectors.

    Args:
        keys: Keys of the lanes, `(lanes, 4)`.
        counter: Number of the vector in its lane, `(lanes,)`.
        dim: Length of a vector.
        dtype: Floating type.

    Returns:
        Standard Normal values `(lanes, dim)`.
    """
    index = torch.arange((dim + 1) // 2, device=keys.device)
    words = threefry((keys[:, 0:1], keys[:, 1:2]), (counter[:, None], index))
    return _normal(*words, dim, dtype)


def uniforms(keys: Tensor, counter: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return row number `counter` of each lane's rows of uniform numbers on [0, 1).

    Args:
        keys: Keys of the lanes, `(lanes, 4)`.
        counter: Number of the row in its lane, `(…, lanes)`.
        count: Numbers in a row.
        dtype: Floating type.

    Returns:
        Uniform values `(…, lanes, count)`.
    """
    index = torch.arange(count, device=keys.device)
    word, _ = threefry((keys[:, 2:3], keys[:, 3:4]), (counter[..., None], index))
    return _uniform(word, dtype)


def both(
    keys: Tensor, vector: Tensor, row: Tensor, dim: int, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return `normals(keys, vector, dim)` and `uniforms(keys, row, count)`, in a form for inductor.

    Args:
        keys: Keys of the lanes, `(lanes, 4)`.
        vector: Number of the Normal vector in its lane, `(lanes,)`.
        row: Number of the row of uniform numbers in its lane, `(lanes,)`.
        dim: Length of the vector.
        count: Numbers in the row.
        dtype: Floating type.

    Returns:
        Standard Normal values `(lanes, dim)`, and uniform values `(lanes, count)`.
    """
    half = (dim + 1) // 2
    index = torch.arange(half + count, device=keys.device)
    first = index < half
    key = (torch.where(first, keys[:, i, None], keys[:, i + 2, None]) for i in range(2))
    counter = torch.where(first, vector[:, None], row[:, None])
    index = torch.where(first, index, index - half)
    a, b = threefry((_held(next(key)), _held(next(key))), (counter, index), hold=True)
    return _normal(a[:, :half], b[:, :half], dim, dtype), _uniform(a[:, half:], dtype)


def _normal(a: Tensor, b: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Turn words into standard Normal values (Box & Muller 1958)."""
    radius = ((a.to(dtype) + 0.5) * 2.0**-32).log().mul(-2).sqrt()
    angle = b.to(dtype) * (2 * torch.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :dim]


def _uniform(word: Tensor, dtype: torch.dtype) -> Tensor:
    # 24 bits are exact in float32, so that 1 is never reached.
    return (word >> 8).to(dtype) * 2.0**-24
