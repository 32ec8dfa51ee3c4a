"""Rows of a tile that its matrix has fewer of: others again, rather than rows outside.

A row of a box that lies outside its tensor takes the TMA far longer than one inside: on an H200 a
product of 33 rows in boxes of 64 took 42 us where one of 64 took 34, and of 65 in two boxes 55
where 128 took 35. So a tile, or each part of one, ends with the matrix's last row or up to three
behind it: parts begin at multiples of four, as the TMA wants of scales that are next to each other.
What two then share is made and stored twice, with the same bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_row_of_part(first_row, part, num_rows, size):
    """Where a part of ``size`` rows begins, of a tile that without this began at ``first_row``."""
    last = gl.maximum(num_rows - size + 3, 0) // 4 * 4
    return gl.minimum(first_row + part * size, last)


@gluon.jit
def row_in_matrix(first_row, row, num_rows, OF_PART: gl.constexpr):
    """The matrix's row that is a tile's ``row``, or one behind its last; parts have OF_PART."""
    return first_row_of_part(first_row, row // OF_PART, num_rows, OF_PART) + row % OF_PART


@gluon.jit
def rows_of_tile(
    first_row, num_rows, ROWS: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr
):
    """The same of each of the tile's."""
    row = gl.arange(0, ROWS, layout=LAYOUT)
    return row_in_matrix(first_row, row, num_rows, ROWS // PARTS)
