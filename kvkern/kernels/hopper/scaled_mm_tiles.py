"""How Hopper's scaled_mm cuts a product up: the tiles that take least time, by a model of it.

A step of 128 of K takes what was measured for a tile of its size on an H200, or what memory takes
to bring its part of b. ``choose_tiles`` knows sizes alone: it is tested without a card.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import triton

from kvkern.kernels.paging import power_of_two
from kvkern.kernels.sum_splits import MOST_SPLITS

NARROW_ROWS = 256  # of a tile of the last 64 columns


class Tiles(NamedTuple):
    """How a product is cut up."""

    rows: int
    columns: int
    num_splits: int  # of K
    stages: int
    is_few: bool = False  # whether ``scaled_mm_few`` has a kernel for it
    kept: int = 0  # steps of a that stay in shared memory from tile to tile: all, or none
    has_turns: bool = False  # whether a warpgroup makes every other tile alone
    steps: int = 1  # of K that a stage has
    extra: int = 0  # columns that a tile has beside its own, of those behind all tiles' own


_SHARED_BYTES = 232_448
# ns of a step of a tile of as many rows and columns, with sums in the tensor core, and with others;
# of tiles that take as long the first is chosen. Fitted, as ``_END_NS``, to times of ten layers
# with 128 to 3072 rows, where what is chosen takes 0.3% longer than the fastest
_STEP_NS = {
    True: {
        (128, 256): 660, (256, 128): 660, (128, 128): 360, (128, 64): 225, (128, 32): 205,
        (64, 128): 200,
    },
    False: {
        (256, 128): 735, (128, 128): 400, (128, 64): 280, (128, 32): 245, (64, 128): 230,
        (64, 64): 150, (64, 32): 127,
    },
}  # fmt: skip
_FEW = Tiles(64, 64, 1, 0, is_few=True)
_STEP_NS_OF_EXPERTS = {  # the same, where b is not read again by others
    True: {(64, 128): 220, (128, 256): 660},
    False: {(64, 128): 250, (128, 128): 400, (256, 128): 690},
}
_STEP_NS_IN_TURNS = 365  # of 128 x 128
_END_NS_IN_TURNS = 2400  # under the other's products, if these take as long
# of a tile by its longer side, if that is 256, or its rows: as times of 160 to 2048 rows have it
_END_NS = {64: 400, 128: 640, 256: 2400}
_END_NS_HELD = 550  # scaling and rounding: the rest is done under the next tile's products
_END_NS_HELD_OFTEN = 880  # where K has four steps or fewer


@lru_cache(maxsize=4096)  # a choice takes the host up to 0.3 ms
def choose_tiles(
    num_rows: int,
    num_columns: int,
    depth: int,
    num_matrices: int,
    *,
    sums_in_tensor_core: bool,
    has_groups: bool,
    num_sms: int,
    can_split: bool = True,
) -> Tiles:
    """What takes the busiest SM the least time.

    Few rows, and more where that fills the card, have the kernel that begins sooner. A thread holds
    a large tile's sums, and the product of a step beside them unless the tensor core sums: so it is
    256 x 128 or 128 x 256. Of these most of what ends a tile is done under the next one's products;
    where they would fill the card less well, warpgroups hide it that make 128 x 128 each in turns,
    for which one of them has to keep the tensor core busy. Where all of K takes no more room than a
    ring, programs keep a's rows and take tile after tile of them. Where a last round would have few
    tiles, and K is long, the columns behind all others are shared out: each tile has 8 to 64 more.
    """
    steps = triton.cdiv(depth, 128)

    def ns(tile: Tiles) -> float:
        """Of the busiest SM."""
        rows, columns, num_splits = tile[:3]
        tiles_m = triton.cdiv(num_rows, rows)
        tiles_n = triton.cdiv(num_columns, columns + tile.extra)
        count = float(num_matrices * tiles_m * tiles_n)
        of_sum = 0.0
        if num_splits > 1:  # a launch, and parts that are written and read
            of_parts = num_splits * num_matrices * num_rows * num_columns  # numbers
            # a ns: sums read 2000, but only few rows of one scale were measured to gain by more
            of_sum = 2400 + of_parts / (2000 if tile.is_few and sums_in_tensor_core else 340)
        if tile.is_few:
            step_of_few = _step_of_few(
                rows_of_box(num_rows, tile), int(count) * num_splits, tiles_m, num_sms,
                sums_in_tensor_core=sums_in_tensor_core, has_groups=has_groups,
            )  # fmt: skip
            return float(triton.cdiv(steps, num_splits) * step_of_few + of_sum)
        of_narrow = 0.0  # rounds
        is_narrow = has_narrow(num_columns, tile, sums_in_tensor_core=sums_in_tensor_core)
        if is_narrow:
            count -= num_matrices * tiles_m
            num_narrow = num_matrices * triton.cdiv(num_rows, NARROW_ROWS)
            of_narrow = _narrow_rounds(num_narrow, int(-count % num_sms))
        count *= num_splits
        if tile.has_turns:
            of_steps = max(_STEP_NS_IN_TURNS, (_STEP_NS_IN_TURNS + _END_NS_IN_TURNS / steps) / 2)
            return float(math.ceil(count / num_sms) * steps * of_steps + 500 + 800)  # as below
        of_step: float = step_ns[rows, columns]
        if tile.extra:  # a is read again, and they are added after the rest
            of_step += (55 if sums_in_tensor_core else 50) + 2.8 * tile.extra
        # or by what memory gives: with less of a beside b more of b is on its way
        memory = 3300 if columns == 32 else 3900 if rows == 64 else 3700  # bytes a ns
        of_b = (columns + tile.extra) * 128 / tiles_m / memory
        rounds, left = divmod(count, num_sms)
        of_steps = rounds * max(of_step, num_sms * of_b) + of_narrow * of_step
        if left > 0:
            of_steps += max(of_step, left * of_b)
        of_end = _END_NS[256 if max(rows, columns) == 256 else rows]
        of_ends = 500 + of_end  # and the start of a warp that fetches
        if num_held(
            tile, steps, rounds=math.ceil(count / num_sms), is_narrow=is_narrow,
            sums_in_tensor_core=sums_in_tensor_core,
        ):  # fmt: skip
            of_end = _END_NS_HELD_OFTEN if steps <= 4 else _END_NS_HELD
        of_ends += (math.ceil(count / num_sms) - 1) * of_end
        return float(triton.cdiv(steps, num_splits) * of_steps + of_ends + of_sum)

    step_ns = _STEP_NS[sums_in_tensor_core]
    most_splits = max(min(steps // 4, MOST_SPLITS), 1) if can_split else 1
    of_columns = triton.cdiv(num_columns, 64) * num_matrices
    few = triton.cdiv(num_rows, 64) * of_columns  # programs
    most_of_few = most_splits
    if num_rows > 64:
        most_of_few = min(most_splits, (2 if num_rows <= 128 else 1) * num_sms // few)
    tiles = [_FEW._replace(num_splits=n) for n in (1, 2, 4, 8, 16) if n <= most_of_few]
    if 32 < num_rows <= 64 and 2 * few <= num_sms:  # few columns would leave SMs idle
        tiles.append(_FEW._replace(rows=32))
    if sums_in_tensor_core and 64 < num_rows <= 128 and few <= 2 * num_sms:
        tiles.append(_FEW._replace(rows=128))
    for rows, columns in step_ns:
        fewest = 257 if columns == 256 else 65
        if num_rows >= fewest and (columns < 256 or steps > 3):
            tile = Tiles(rows, columns, 1, 0, steps=_steps_of_stage(rows, sums_in_tensor_core))
            tiles += [tile._replace(num_splits=n) for n in (1, 2, 4, 8) if n <= most_splits]
            if rows == 128 and columns >= 128 and steps >= 16:
                tiles += [tile._replace(extra=n) for n in (8, 16, 32, 64)]
    if sums_in_tensor_core and num_rows > 256:
        tiles.append(Tiles(128, 128, 1, 0, has_turns=True))
    best = min(tiles, key=ns)
    if best.is_few:
        programs = triton.cdiv(
            triton.cdiv(num_rows, best.rows) * of_columns * best.num_splits, num_sms
        )
        return _with_stages_of_few(best, rows_of_box(num_rows, best), steps, programs)
    most = 14 if best.steps == 2 else 11 if sums_in_tensor_core or best.rows == 64 else 8
    in_ring = min(_most_stages(best.rows, best.columns + best.extra, _SHARED_BYTES), most)
    stages = in_ring // best.steps
    is_one = num_rows <= best.rows and best.columns == 128  # tile of rows
    keeps_a = 3 <= steps <= 4 and best.num_splits == 1 and (best.rows == 256 or is_one)
    is_narrow = has_narrow(num_columns, best, sums_in_tensor_core=sums_in_tensor_core)
    if keeps_a and not is_narrow and not best.extra:
        # a step's place is free again when those of a ring have been multiplied after it
        return best._replace(stages=min(stages, steps), kept=steps)
    return best._replace(stages=stages)


def choose_tiles_of_experts(rows_of_expert: int, *, sums_in_tensor_core: bool) -> Tiles:
    """Tiles that take the least time for 128 columns, if the last of an expert's is half full."""

    def ns(tile: tuple[int, int]) -> float:
        rows, columns = tile
        return (rows_of_expert / rows + 0.5) * of_step[tile] * 128 / columns

    of_step = _STEP_NS_OF_EXPERTS[sums_in_tensor_core]
    rows, columns = min(of_step, key=ns)
    of_k = _steps_of_stage(rows, sums_in_tensor_core)
    stages = min(_most_stages(rows, columns, _SHARED_BYTES - 4096), 8) // of_k
    return Tiles(rows, columns, 1, stages, steps=of_k)


def _steps_of_stage(rows: int, sums_in_tensor_core: bool) -> int:
    """Of K; the pair that one warpgroup has under way."""
    return 2 if rows == 64 and not sums_in_tensor_core else 1


def _step_of_few(
    rows: int,
    count: int,  # of programs
    tiles_m: int,
    num_sms: int,
    *,
    sums_in_tensor_core: bool,
    has_groups: bool,
) -> float:
    """ns: of a program alone, or by what its SM takes in, or by what memory gives."""
    programs = triton.cdiv(count, num_sms)
    taken_in = programs * (rows + 64) * 128 / 114
    memory = 4000 if 4 * count > 3 * num_sms and rows <= 64 else 3600  # bytes a ns
    of_b = count / tiles_m * 64 * 128 / memory
    if sums_in_tensor_core:
        return float(max(118 if rows <= 64 else 215, taken_in, of_b))
    alone = 135 + 1.45 * rows if has_groups else 115 + 0.8 * rows
    return float(max(alone, programs * alone * 0.75, taken_in, of_b))


def rows_of_box(num_rows: int, tile: Tiles) -> int:
    """That the TMA fetches at once."""
    return power_of_two(min(max(num_rows, 8), tile.rows))


def num_parts_of_rows(num_rows: int, num_columns: int, tile: Tiles) -> int:
    """Boxes of 32 or more, whose scales are aligned in shared memory, that a tile's rows come in.

    Of two warpgroups each has one, where one tile has all rows; of more the last begins sooner.
    Where registers are short, as of tiles beside narrow ones, there is one box.
    """
    if tile.is_few:
        return 2 if rows_of_box(num_rows, tile) >= 64 else 1
    is_one = max(tile.rows // 2, 64) < num_rows <= tile.rows
    is_narrow = tile.rows == 256 and has_narrow(num_columns, tile, sums_in_tensor_core=False)
    return 2 if is_one and not is_narrow and not tile.has_turns else 1


def _with_stages_of_few(tiles: Tiles, rows: int, steps: int, programs: int) -> Tiles:
    """As many as have room beside the SM's other programs, and as K has.

    Room for one program more would be taken by a launch that begins before the one before it has
    ended: some SMs would have one too many. An SM has 1 KB more than one program may have, and
    keeps 1 KB for each; 512 bytes are for barriers.
    """
    of_columns = 4 * power_of_two(max(triton.cdiv(steps, tiles.num_splits) + 1, 128))  # scales
    room = (_SHARED_BYTES + 1024) // min(programs, 5) - 1024 - of_columns - 512
    stages = min(room // ((rows + 64) * 128 + 4 * max(rows, 32)), 20)
    of_k = 2 if stages >= 6 or rows <= 16 else 1
    stages = min(stages // of_k, triton.cdiv(steps, of_k * tiles.num_splits))
    return tiles._replace(stages=max(stages, 2), steps=of_k)


def _most_stages(rows: int, columns: int, shared_bytes: int) -> int:
    """Beside what is staged for the store, scales and bias."""
    return (shared_bytes - 21 * 1024) // ((rows + columns) * 128 + 4 * (rows + 64))


def has_narrow(num_columns: int, tiles: Tiles, *, sums_in_tensor_core: bool) -> bool:
    """Whether the last columns have tiles of 64 columns by 256 rows.

    Of tiles of 128 rows they are transposed, which takes a warpgroup's registers for sums alone.
    """
    is_wide = tiles.rows == 256 or (tiles.columns == 256 and sums_in_tensor_core)
    is_wide = is_wide and tiles.num_splits == 1 and num_columns > tiles.columns
    return is_wide and tiles.extra == 0 and 0 < num_columns % tiles.columns <= 64


def _narrow_rounds(count: int, num_free: int) -> float:
    """What narrow tiles, of 0.6 of the time of others, add to those' rounds.

    They go to the SMs that are free in the last, and then to the same again.
    """
    if count <= num_free:
        return 0.0
    return 0.2 if count <= 2 * num_free else 0.6


def num_groups(tiles: Tiles) -> int:
    """Warpgroups that multiply; one has the registers for sums of 64 x 128 and two products."""
    return 1 if tiles.rows == 64 else 2


def num_boxes(
    tiles: Tiles,
    *,
    num_experts: int,
    has_groups: bool,
    num_of_columns: int,  # kinds of values that each column has: a scale, a bias
) -> int:
    """That a warpgroup has on their way out: two if it is alone or the tile large, and has room.

    With one a warpgroup waits until that has been read before it stages the next.
    """
    groups = num_groups(tiles)
    if groups == 2 and max(tiles.rows, tiles.columns) < 256 and not tiles.has_turns:
        return 1
    steps = tiles.stages * tiles.steps
    used = steps * (tiles.rows + tiles.columns + tiles.extra) * 128 + 4 * num_experts + 512
    if has_groups:
        used += steps * (tiles.rows + (128 if tiles.extra else 64)) * 4
    used += num_of_columns * 8 * tiles.columns
    return 2 if used + 2 * groups * 8192 <= _SHARED_BYTES else 1


def num_held(
    tiles: Tiles,
    steps: int,  # of K
    *,
    rounds: int,  # tiles of the program that has most
    bytes_of_value: int = 2,
    is_narrow: bool,  # whether the last columns have tiles of their own
    is_grouped: bool = False,  # whether experts share the rows out
    sums_in_tensor_core: bool,
) -> int:
    """Boxes of a result that a warpgroup holds until the next tile's products, to store it there.

    Of a large tile, whose end takes long; elsewhere registers are short, or nothing is gained. In
    the tensor core each box has a step of its own.
    """
    is_plain = max(tiles.rows, tiles.columns) == 256 and tiles.num_splits == 1 and not is_narrow
    if not is_plain or tiles.extra or bytes_of_value != 2 or rounds == 1:
        return 0
    if sums_in_tensor_core:
        return 4 if steps >= 4 and not tiles.kept else 0
    return 0 if is_grouped else 4


def band_of(tiles: Tiles, tiles_n: int, depth: int, num_sms: int) -> int:
    """Row tiles that are done column after column, whose rows of a stay in the L2.

    Where K is short, more of them mean that b is read less often. Elsewhere a round of 132 SMs is
    12 x 11 tiles, or 6 x 22, which draws less power than 16 x 8 and a rest; unless columns are few.
    """
    if tiles.kept:
        return 1
    rows = 4096 if depth <= 2048 else 1536
    return (rows if rows // tiles.rows * tiles_n >= num_sms else 2048) // tiles.rows
