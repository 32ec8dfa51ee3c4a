"""Numbers of tokens that stand for all others: what is compiled for them, every step finds.

Kernels are compiled at first use, each for some seconds, in variants. Which one runs a step depends
on its number of tokens by way of tiles alone, and tiles are chosen for that number's size class: a
power of two up to 128, from there on a multiple of an eighth of the next one, at most of 128.
"""

from kvkern.errors import ArgumentError

_TILE = 128  # tokens of most tiles, where there are so many


def warm_up_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens to run a step with, once each, before serving.

    After that nothing is compiled for any number up to ``max_tokens``, in calls that are otherwise
    alike: the same layers, dtypes, scales, memory layout and backends (but DeepGEMM, by name, which
    compiles for numbers of its own choice). What depends on a request rather than on the number of
    tokens needs steps of its own: a first token and later ones, a prompt with cached context (of
    one chunk, and of more) and without, the shortest and the longest context, each number of new
    tokens a request that ``mla_decode`` is to be given.

    Args:
        max_tokens: the most tokens of a step, >= 1.

    Returns:
        Size classes below ``max_tokens``, rising, and ``max_tokens``: 1, 2, 4, ... 128, 160, 192,
        224, 256, 320, ... 512, 640, 768, ...: 8 numbers for 128, 28 for 2048, 76 for 8192.

    Raises:
        ArgumentError: ``max_tokens`` is less than 1.
    """
    if max_tokens < 1:
        raise ArgumentError(f"max_tokens: want >= 1, got {max_tokens}")
    sizes = [1]
    while sizes[-1] < max_tokens:
        sizes.append(min(size_class(sizes[-1] + 1), max_tokens))
    return sizes


def size_class(num_tokens: int) -> int:
    """The number that tiles are chosen for: the smallest class that is not below."""
    if num_tokens <= _TILE:
        return 1 << max(num_tokens - 1, 0).bit_length()
    step = min((1 << (num_tokens - 1).bit_length()) // 8, _TILE)
    return -(-num_tokens // step) * step
