"""Which tiles of scaled_mm a program makes, one after the other, and where in ``out`` they are.

Every role of a program finds that by itself, on the device; ``Order`` is what is known when
compiled.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvkern.kernels.hopper.scaled_mm_few import BLOCK_K
from kvkern.kernels.hopper.scaled_mm_tiles import NARROW_ROWS as _NARROW_ROWS
from kvkern.kernels.hopper.tile_rows import first_row_of_part

HUGE = 2**21  # units, from which on an inverse of 24 bits may be off by more than one
WAVE: gl.constexpr = gl.constexpr(64)  # rows that wgmma takes
NARROW_ROWS: gl.constexpr = gl.constexpr(_NARROW_ROWS)


class Order(NamedTuple):
    """Which tiles there are, and how they follow each other; all of it known when compiled."""

    rows: int  # of a tile
    columns: int
    steps: int  # of 128 of K that a stage of the ring has
    band: int  # row tiles that are done column after column
    kept: int  # steps of a that stay while tiles have the same rows: all, or none
    extra: int  # columns that a tile has beside its own, of those behind all tiles' own
    has_narrow: bool  # the last column of tiles has 64 columns or fewer
    has_splits: bool
    has_matrices: bool
    groups: int  # of warps that multiply
    has_turns: bool  # a warpgroup makes every other tile alone
    num_experts: int  # at most, that share out a's rows; 0: all rows go with each matrix
    adds_both: bool  # products of a pair before the next pair is begun
    ahead: int  # stages that are filled before all barriers are made and the warps have begun
    divides: bool  # numbers of units as integers, not by an inverse
    held: int  # boxes of a result that a warpgroup stores under the next tile's products, or 0
    shift: int  # instructions that move the second warpgroup's code
    parts: int  # of a tile's rows, each of which ends with the last row (``tile_rows``)


@gluon.constexpr_function
def first_row_of(which, order):
    """Of a warpgroup in a tile, whose rows are shared out if there are more than 64."""
    return which * order.rows // 2 if order.rows > 64 and not order.has_turns else 0


@gluon.jit
def row_of_wave(row, which, num_rows, ORDER: gl.constexpr):
    """Where a warpgroup's rows of a tile begin in its matrix."""
    if ORDER.parts > 1 and which > 0:
        return first_row_of_part(row, which, num_rows, ORDER.rows // ORDER.parts)
    else:
        return row + first_row_of(which, ORDER)


@gluon.constexpr_function
def has_two(order):
    """Whether a warpgroup has twice the 64 rows that wgmma takes."""
    return order.rows == (128 if order.has_turns else 256)


@gluon.constexpr_function
def has_two_products(order):
    """Of each step in a warpgroup."""
    return order.rows == (128 if order.has_turns else 256) or order.extra > 0


@gluon.constexpr_function
def is_transposed(order):
    """Whether narrow tiles are: b's columns are then the 64 rows that wgmma takes."""
    return order.has_narrow and order.rows == 128


@gluon.constexpr_function
def transposed_order(order):
    """Of narrow tiles that one warpgroup makes while the other goes on."""
    return Order(*order)._replace(rows=WAVE.value, columns=NARROW_ROWS.value, groups=1)


@gluon.constexpr_function
def makes_transposed(order):
    """Whether the order is ``transposed_order``'s: stages are let go of for the other as well."""
    return order.has_narrow and order.rows == 64


@gluon.jit
def _over(number, count, ORDER: gl.constexpr):
    """number // count, of neither that is negative.

    By an inverse, which is the same from tile to tile where the count is, the two of a tile take
    some 140 cycles less than as divisions of integers.
    """
    if ORDER.divides:
        return number // count
    else:
        inverse = 1.0 / (count + 0 * number).to(gl.float32)
        quotient = (number.to(gl.float32) * inverse).to(gl.int32)  # off by one, at most
        rest = number - quotient * count
        return quotient + (rest >= count).to(gl.int32) - (rest < 0).to(gl.int32)


@gluon.jit
def _tiles_n(num_columns, ORDER: gl.constexpr):
    return gl.cdiv(num_columns, ORDER.columns + ORDER.extra)


@gluon.jit
def first_extra_column(n, num_columns, ORDER: gl.constexpr):
    """Of the columns that a tile has beside its own."""
    return _tiles_n(num_columns, ORDER) * ORDER.columns + n * ORDER.extra


@gluon.jit
def _num_units(shape, ORDER: gl.constexpr):
    num_rows, num_columns, _, num_matrices, num_splits, experts = shape
    tiles_n = _tiles_n(num_columns, ORDER)
    if ORDER.num_experts:
        _, _, tiles_m = experts
        return tiles_m * tiles_n
    tiles_m = gl.cdiv(num_rows, ORDER.rows)
    if ORDER.has_narrow:
        return num_matrices * (tiles_m * (tiles_n - 1) + gl.cdiv(num_rows, NARROW_ROWS))
    else:
        return num_matrices * (tiles_m * tiles_n) * num_splits


@gluon.jit
def num_rounds(shape, ORDER: gl.constexpr):
    """Units that this program has."""
    num_units = _num_units(shape, ORDER)
    if ORDER.kept:
        return _first_of(gl.program_id(0) + 1, num_units) - _first_of(gl.program_id(0), num_units)
    rounds = _over(num_units, gl.num_programs(0), ORDER)
    return rounds + (_in_turn(rounds, ORDER) < num_units).to(gl.int32)


@gluon.jit
def _in_turn(turn, ORDER: gl.constexpr):
    """With narrow tiles turns go to and fro: programs that get one get the next ones too."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if ORDER.has_narrow:
        program = gl.where(turn % 2 == 1, programs - 1 - program, program)
    return turn * programs + program


@gluon.jit
def _first_of(program, num_units):
    """Where a's rows are kept a program's units are next to each other."""
    return (program.to(gl.int64) * num_units // gl.num_programs(0)).to(gl.int32)


@gluon.jit
def share_out(row_offsets_ptr, num_rows, num_matrices, ORDER: gl.constexpr):
    """What experts are found by: how many row tiles there are up to each, and in all."""
    COUNT: gl.constexpr = ORDER.num_experts
    LAYOUT: gl.constexpr = gl.BlockedLayout([COUNT // 128], [32], [4], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    expert = gl.arange(0, COUNT, layout=LAYOUT)
    start, end = rows_of(expert, row_offsets_ptr, num_rows, num_matrices)
    up_to = gl.associative_scan(gl.cdiv(end - start, ORDER.rows), 0, _sum)
    tiles_up_to = gl.allocate_shared_memory(gl.int32, [COUNT], FLAT)
    tiles_up_to.store(up_to)
    return row_offsets_ptr, tiles_up_to, gl.max(up_to, 0)


@gluon.constexpr_function
def _layout_of_experts(count, num_warps):
    """Each warp has all of them."""
    return gl.SliceLayout(0, gl.BlockedLayout([1, count // 32], [1, 32], [num_warps, 1], [1, 0]))


@gluon.jit
def _sum(one, other):
    return one + other


@gluon.jit
def rows_of(expert, row_offsets_ptr, num_rows, num_matrices):
    """The first and the one past the last; within a, whatever the offsets are."""
    is_one = expert < num_matrices
    start = gl.load(row_offsets_ptr + expert, mask=is_one, other=0)
    end = gl.load(row_offsets_ptr + expert + 1, mask=is_one, other=0)
    start = gl.maximum(gl.minimum(start, num_rows), 0)
    return start, gl.maximum(gl.minimum(end, num_rows), start)


@gluon.jit
def _expert_of(row_tile, tiles_up_to, WARPS: gl.constexpr):
    """Whose a tile of rows is, the first of its tiles and the one past its last."""
    up_to = tiles_up_to.load(_layout_of_experts(tiles_up_to.shape[0], WARPS))
    is_before = up_to <= row_tile
    expert = gl.sum(is_before.to(gl.int32), 0)
    first = gl.max(gl.where(is_before, up_to, 0), 0)
    return expert, first, gl.min(gl.where(is_before, 2**30, up_to), 0)


@gluon.jit
def place_of_unit(turn, shape, ORDER: gl.constexpr, WARPS: gl.constexpr):
    """Matrix, first row, end of its rows, column tile, split and steps of a unit.

    Bands of row tiles, each column after column, expert after expert. Narrow tiles, the last
    column's, come after all others. Of a small tile no rows are past the last, but of experts'.
    """
    num_rows, num_columns, depth, num_matrices, num_splits, experts = shape
    BAND: gl.constexpr = ORDER.band
    tiles_m = gl.cdiv(num_rows, ORDER.rows)
    num_wide = _tiles_n(num_columns, ORDER) - (1 if ORDER.has_narrow else 0)
    if ORDER.kept:
        tile = _first_of(gl.program_id(0), _num_units(shape, ORDER)) + turn
    else:
        tile = _in_turn(turn, ORDER)
    split = 0 * turn
    first_step = 0 * turn
    end_step = gl.cdiv(depth, BLOCK_K)
    if ORDER.has_splits:  # each begins with a stage
        stages = gl.cdiv(end_step, ORDER.steps)
        unit = tile
        tile = _over(unit, num_splits, ORDER)
        split = unit - tile * num_splits
        first_step = _over(split * stages, num_splits, ORDER) * ORDER.steps
        end_of_split = _over((split + 1) * stages, num_splits, ORDER) * ORDER.steps
        end_step = gl.minimum(end_of_split, end_step)
    in_matrix = tile
    matrix = 0 * turn
    if ORDER.has_matrices:
        matrix = _over(tile, tiles_m * num_wide, ORDER)
        in_matrix = tile - matrix * tiles_m * num_wide
    if ORDER.num_experts:
        row_offsets_ptr, tiles_up_to, _ = experts
        matrix, before, up_to = _expert_of(_over(tile, num_wide, ORDER), tiles_up_to, WARPS)
        in_matrix = tile - before * num_wide
        tiles_m = up_to - before
    band = _over(in_matrix, BAND * num_wide, ORDER)
    in_band = in_matrix - band * BAND * num_wide
    n = in_band // BAND
    m = in_band % BAND
    band_rows = tiles_m - band * BAND
    if band_rows < BAND:
        n = _over(in_band, gl.maximum(band_rows, 1), ORDER)
        m = in_band - n * band_rows
    m += band * BAND
    row = m * ORDER.rows
    if ORDER.has_narrow:
        narrow = tile - num_matrices * tiles_m * num_wide
        if narrow >= 0:
            narrow_m = gl.cdiv(num_rows, NARROW_ROWS)
            matrix = _over(narrow, narrow_m, ORDER) if ORDER.has_matrices else 0 * turn
            row = (narrow - matrix * narrow_m) * NARROW_ROWS
            n = num_wide
    end = num_rows
    if ORDER.num_experts:
        start, end = rows_of(matrix, row_offsets_ptr, num_rows, num_matrices)
        row += start
    elif max(ORDER.rows, ORDER.columns) < 256:  # in large ones the TMA has the time
        row = first_row_of_part(row, 0, num_rows, ORDER.rows)
    return matrix, row, end, n, split, first_step, end_step


@gluon.jit
def where_to(place, shape, ORDER: gl.constexpr):
    """Which of out's matrices, or the end of an expert's rows."""
    matrix, _, end, _, split, _, _ = place
    _, _, _, num_matrices, _, _ = shape
    return end if ORDER.num_experts else split * num_matrices + matrix
