"""How permute and unpermute are cut up, in both passes."""

from kernels.device import ceil_div, need

TILE = 32  # positions and channels a block of version 2
TILE_ROW = TILE + 1  # a column of this many floats a row lies in 32 different banks
TILE_THREADS = TILE, 8
ROUNDS = 4  # positions a thread of unpermute's version 3


def tile_grid(B, T, NH, hs):
    """Blocks for the tiles of positions and channels, the heads and the sequences."""
    need(B * NH < 65536, f"needs B*NH below 65536, got {B * NH}")
    return ceil_div(T, TILE), ceil_div(hs, TILE), B * NH


def shape_of_heads(heads):
    """B, T, NH, hs of an array (B, NH, T, hs)."""
    B, NH, T, hs = heads.shape
    return B, T, NH, hs


def threads_and_grid(B, T, NH, hs, block_size, rounds):
    """Threads: a head's channels, four a thread, by positions. Blocks: `rounds` times so many positions, heads, sequences."""
    need(hs % 4 == 0, f"needs hs a multiple of 4, got {hs}")
    need(hs <= 4 * block_size, f"needs hs at most {4 * block_size}, got {hs}")
    need(B < 65536 and NH < 65536, f"needs B and NH below 65536, got {B} and {NH}")
    threads = hs // 4, block_size // (hs // 4)
    return (ceil_div(T, rounds * threads[1]), NH, B), threads
