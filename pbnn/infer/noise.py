"""Counter-based random numbers for lanes: a pure function of a lane's key and its own counter.

A generator with a hidden state would tie a chain's numbers to how far the others have come. Here
the k-th momentum of a chain depends on its seed and on k alone, on any device, in any batch.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["lane_keys", "normals", "threefry", "uniforms"]

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


def threefry(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, §4), on words held in int64.

    Args:
        key: Two words that broadcast with the counter.
        counter: Two words.

    Returns:
        Two words of the broadcast shape, uniform on 0 … 2³² − 1.
    """
    # Words of 32 bits in 64: torch has no arithmetic on unsigned words on every device.
    schedule = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (counter[0] + schedule[0]) & _WORD, (counter[1] + schedule[1]) & _WORD
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            a = (a + b) & _WORD
            b = a ^ (((b << rotation) | (b >> (32 - rotation))) & _WORD)
        a = (a + schedule[(block + 1) % 3]) & _WORD
        b = (b + schedule[(block + 2) % 3] + (block + 1)) & _WORD
    return a, b


def normals(keys: Tensor, counter: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return vector number `counter` of each lane's standard Normal vectors (Box & Muller 1958).

    Args:
        keys: Keys of the lanes, `(lanes, 4)`.
        counter: Number of the vector in its lane, `(lanes,)`.
        dim: Length of a vector.
        dtype: Floating type.

    Returns:
        Standard Normal values `(lanes, dim)`.
    """
    half = (dim + 1) // 2
    index = torch.arange(half, device=keys.device)
    a, b = threefry((keys[:, 0:1], keys[:, 1:2]), (counter[:, None], index))
    radius = ((a.to(dtype) + 0.5) * 2.0**-32).log().mul(-2).sqrt()
    angle = b.to(dtype) * (2 * torch.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :dim]


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
    a, _ = threefry((keys[:, 2:3], keys[:, 3:4]), (counter[..., None], index))
    # 24 bits are exact in float32, so that 1 is never reached.
    return (a >> 8).to(dtype) * 2.0**-24
