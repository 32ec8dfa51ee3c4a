"""The end of a tile of scaled_mm: scales, bias, rounding, and the way to ``out``.

By TMA, 64 rows by 128 bytes at a time, as ``wgmma`` leaves them in registers; or first held there,
packed, until the next tile's products are under way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kvkern.kernels.hopper.compat import store_tile, view_tile
from kvkern.kernels.hopper.scaled_mm_order import WAVE, has_two


@gluon.jit
def load_ends(
    scales, shape, strides, matrix, row, n, LAYOUT: gl.constexpr, HAS_GROUPS: gl.constexpr,
    HAS_COLUMN_SCALES: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """What the end of a tile wants, under way while its products are made.

    Scales of its rows, of the 64 rows after them, of its columns, and its bias.
    """
    scale_a_ptr, scale_b_ptr, bias_ptr = scales
    num_rows, num_columns, _, _, _, _ = shape
    a_matrix, a_row, _, b_matrix, _, b_column, stride_bias = strides
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = n * ORDER.columns + gl.arange(0, ORDER.columns, layout=THREADS)
    column = gl.minimum(column, num_columns - 1)
    scale_a = 1.0
    scale_a_2 = 1.0
    scale_b = 1.0
    bias = 0.0
    if not HAS_GROUPS:
        of_a = scale_a_ptr + matrix.to(gl.int64) * a_matrix
        scale_a = _load_of_rows(of_a, row, num_rows, a_row, LAYOUT)
        scale_a_2 = scale_a
        if has_two(ORDER):
            scale_a_2 = _load_of_rows(of_a, row + WAVE, num_rows, a_row, LAYOUT)
        of_b = scale_b_ptr + matrix.to(gl.int64) * b_matrix
        if HAS_COLUMN_SCALES:
            scale_b = gl.load(of_b + column.to(gl.int64) * b_column)
        else:
            scale_b = gl.load(of_b)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + matrix.to(gl.int64) * stride_bias + column).to(gl.float32)
    return scale_a, scale_a_2, scale_b, bias


@gluon.jit
def _load_of_rows(of_a, row, num_rows, stride, LAYOUT: gl.constexpr):
    rows = gl.minimum(row + gl.arange(0, WAVE, layout=gl.SliceLayout(1, LAYOUT)), num_rows - 1)
    return gl.load(of_a + rows.to(gl.int64) * stride)


@gluon.jit
def store_result(
    acc, ends, into, row, column, WHICH: gl.constexpr,
    NUMBER: gl.constexpr,  # of boxes of the tile before
    OFFSET: gl.constexpr,  # of the first column in the tile
    BOXES: gl.constexpr, HAS_COLUMN_SCALES: gl.constexpr, HAS_BIAS: gl.constexpr,
    OF_GROUP: gl.constexpr,  # what a warpgroup has in ``of_columns``
):  # fmt: skip
    """Scale columns, add the bias, round and store, by as many columns as a box has.

    A warpgroup's boxes take turns in what it has of ``staged``; of a tile they are a multiple.
    """
    staged, of_columns, out_desc, _ = ends
    COLUMNS: gl.constexpr = acc.shape[1]
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    OF_BOX: gl.constexpr = staged.shape[len(staged.shape) - 1]
    if COLUMNS > OF_BOX:
        left, right = acc.reshape([WAVE, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
        store_result(
            left, ends, into, row, column, WHICH, NUMBER, OFFSET, BOXES,
            HAS_COLUMN_SCALES, HAS_BIAS, OF_GROUP,
        )  # fmt: skip
        store_result(
            right, ends, into, row, column, WHICH,
            NUMBER + COLUMNS // 2 // OF_BOX, OFFSET + COLUMNS // 2, BOXES,
            HAS_COLUMN_SCALES, HAS_BIAS, OF_GROUP,
        )  # fmt: skip
    else:
        if HAS_COLUMN_SCALES:
            scale = of_columns.index(WHICH * OF_GROUP).slice(OFFSET, COLUMNS).load(OF_COLUMN)
            acc *= gl.expand_dims(scale, 0)
        if HAS_BIAS:
            bias = of_columns.index(WHICH * OF_GROUP + OF_GROUP - 1)
            bias = bias.slice(OFFSET, COLUMNS).load(OF_COLUMN)
            acc += gl.expand_dims(bias, 0)
        tma.store_wait(BOXES - 1)  # what was staged there before has been read
        box = staged.index(WHICH * BOXES + NUMBER % BOXES)
        _stage(acc.to(box.dtype), box)
        _store_box(box, out_desc, into, row, column + OFFSET)


@gluon.jit
def _stage(x, box):
    """Store to shared memory, where the TMA sees it."""
    RANK: gl.constexpr = len(box.shape)
    SWIZZLE: gl.constexpr = box.type.layout.swizzle_byte_width
    FLAT: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, box.dtype.primitive_bitwidth, 2)
    view_tile(box, box.dtype, [box.shape[RANK - 2], box.shape[RANK - 1]], FLAT).store(x)
    fence_async_shared()


@gluon.jit
def _store_box(box, out_desc, into, row, column):
    """Into a matrix of out, or, of rows that are shared out, up to where an expert's end."""
    if len(out_desc.block_type.shape) == 4:
        store_tile(out_desc, [2**30, into, 2**30 - into + row, column], box)
    else:
        store_tile(out_desc, [into, row, column], box)


@gluon.jit
def pack(
    acc, scale_a, of_ends, DTYPE: gl.constexpr, HAS_GROUPS: gl.constexpr,
    HAS_COLUMN_SCALES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Scaled, with the bias, and rounded: two columns of 16 bits a register."""
    scale_b, bias = of_ends
    COLUMNS: gl.constexpr = acc.shape[1]
    if not HAS_GROUPS:
        if HAS_COLUMN_SCALES:
            acc *= gl.expand_dims(scale_a, 1)
            acc *= gl.expand_dims(scale_b, 0)
        else:
            acc *= gl.expand_dims(scale_a * scale_b, 1)
    if HAS_BIAS:
        acc += gl.expand_dims(bias, 0)
    even, odd = acc.reshape([WAVE, COLUMNS // 2, 2]).split()
    TO: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
    ASM: gl.constexpr = "cvt.rn." + TO + ".f32 $0, $2, $1;"
    packed = gl.inline_asm_elementwise(
        ASM, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.convert_layout(packed, _packed_layout(COLUMNS), assert_trivial=True)


@gluon.constexpr_function
def _packed_layout(columns):
    """Of ``pack``, as threads have what ``wgmma`` makes."""
    of_pairs = [[0, 4 << bit] for bit in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *of_pairs],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns // 2],
    )


@gluon.jit
def nothing_held(shape, ORDER: gl.constexpr):
    """Held before the first tile: of rows that there are not, so that nothing is stored."""
    num_rows, _, _, _, _, _ = shape
    COLUMNS: gl.constexpr = ORDER.columns if ORDER.held else 8
    nothing = gl.zeros([WAVE, COLUMNS // 2], gl.int32, _packed_layout(COLUMNS))
    return nothing, nothing, 0 * num_rows, num_rows, 0 * num_rows


@gluon.jit
def store_box_of_held(held, NUMBER: gl.constexpr, ends, WHICH: gl.constexpr, ORDER: gl.constexpr):
    """One of the boxes that a warpgroup holds, of 64 rows."""
    first, second, into, row, column = held
    staged, _, out_desc, _ = ends
    OF_BOX: gl.constexpr = staged.shape[len(staged.shape) - 1]
    BOXES: gl.constexpr = staged.shape[0] // ORDER.groups
    COUNT: gl.constexpr = 2 * first.shape[1] // OF_BOX  # next to each other
    if NUMBER < COUNT:
        part = _columns_of(first, NUMBER, OF_BOX // 2)
    else:
        part = _columns_of(second, NUMBER - COUNT, OF_BOX // 2)
        row += WAVE
    tma.store_wait(BOXES - 1)  # what was staged there before has been read
    box = staged.index(WHICH * BOXES + NUMBER % BOXES)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(box.type.layout.swizzle_byte_width, 32, 2)
    view_tile(box, gl.int32, [WAVE, OF_BOX // 2], FLAT).store(part)
    fence_async_shared()
    _store_box(box, out_desc, into, row, column + NUMBER % COUNT * OF_BOX)


@gluon.jit
def _columns_of(x, NUMBER: gl.constexpr, WIDTH: gl.constexpr):
    """As many, of registers."""
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS == WIDTH:
        return x
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = x.reshape([WAVE, 2, HALF]).permute([0, 2, 1]).split()
        if NUMBER < HALF // WIDTH:
            return _columns_of(left, NUMBER, WIDTH)
        else:
            return _columns_of(right, NUMBER - HALF // WIDTH, WIDTH)


@gluon.jit
def store_transposed(
    acc, scale_a, of_columns, ends, into, row, column, WHICH: gl.constexpr,
    NUMBER: gl.constexpr,  # of 64 rows
):  # fmt: skip
    """Scale, add the bias, round and store 64 columns of 64 rows.

    That is one box or, of four bytes, two next to each other.
    """
    staged, _, out_desc, _ = ends
    BOXES: gl.constexpr = staged.shape[0] // 2
    OF_BOX: gl.constexpr = staged.shape[3]
    COUNT: gl.constexpr = WAVE // OF_BOX
    FIRST: gl.constexpr = WHICH * BOXES + NUMBER * COUNT % BOXES
    SWIZZLE: gl.constexpr = staged.type.layout.swizzle_byte_width
    FLAT: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, staged.dtype.primitive_bitwidth, 2)
    gl.static_assert(COUNT <= BOXES, "all columns of a narrow tile are staged at once")
    LAYOUT: gl.constexpr = acc.type.layout
    scale_b, bias = of_columns
    acc *= gl.expand_dims(gl.convert_layout(scale_a, gl.SliceLayout(0, LAYOUT)), 0)
    acc *= gl.expand_dims(gl.convert_layout(scale_b, gl.SliceLayout(1, LAYOUT)), 1)
    acc += gl.expand_dims(gl.convert_layout(bias, gl.SliceLayout(1, LAYOUT)), 1)
    tma.store_wait(BOXES - COUNT)  # what was staged there before has been read
    boxes = view_tile(staged, staged.dtype, [2 * BOXES * WAVE, OF_BOX], FLAT)
    boxes = boxes.slice(FIRST * WAVE, COUNT * WAVE, dim=0)
    out = acc.to(staged.dtype).reshape([COUNT, OF_BOX, WAVE]).permute([1, 0, 2])
    boxes.permute([1, 0]).store(out.reshape([OF_BOX, COUNT * WAVE]))
    fence_async_shared()
    for number in gl.static_range(COUNT):
        box = staged.index(FIRST + number)
        _store_box(box, out_desc, into, row, column + number * OF_BOX)


@gluon.jit
def store_extra(
    acc, ends, scales, shape, strides, matrix, row, column, HAS_COLUMN_SCALES: gl.constexpr
):
    """Scale columns, add the bias, round and store, from registers."""
    _, _, _, plain = ends
    out_ptr, stride_out_matrix, stride_out_row = plain
    _, scale_b_ptr, bias_ptr = scales
    num_rows, num_columns, _, _, _, _ = shape
    _, _, _, b_matrix, _, b_column, stride_bias = strides
    offs_m = row + gl.arange(0, WAVE, layout=gl.SliceLayout(1, acc.type.layout))
    offs_n = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    mask_n = offs_n < num_columns
    if HAS_COLUMN_SCALES:
        of_b = scale_b_ptr + matrix.to(gl.int64) * b_matrix + offs_n.to(gl.int64) * b_column
        acc *= gl.expand_dims(gl.load(of_b, mask=mask_n, other=0), 0)
    if bias_ptr is not None:
        of_bias = bias_ptr + matrix.to(gl.int64) * stride_bias + offs_n
        acc += gl.expand_dims(gl.load(of_bias, mask=mask_n, other=0).to(gl.float32), 0)
    VEC: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    stride_out_matrix = stride_out_matrix // VEC * VEC  # rows begin at multiples of 16 bytes
    stride_out_row = stride_out_row // VEC * VEC
    out_ptr += matrix.to(gl.int64) * stride_out_matrix
    offs = gl.expand_dims(offs_m.to(gl.int64) * stride_out_row, 1) + gl.expand_dims(offs_n, 0)
    mask = gl.expand_dims(offs_m < num_rows, 1) & gl.expand_dims(mask_n, 0)
    gl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def clear_padding(ends, shape):
    """Zeros into rows past the last expert's."""
    staged, _, out_desc, _ = ends
    num_rows, num_columns, _, num_matrices, _, experts = shape
    row_offsets_ptr, _, _ = experts
    COLUMNS: gl.constexpr = staged.shape[len(staged.shape) - 1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    first_row = gl.maximum(gl.load(row_offsets_ptr + num_matrices), 0)
    if first_row < num_rows:
        box = staged.index(0)
        tma.store_wait(0)  # what was staged there before has been read
        _stage(gl.zeros([WAVE, COLUMNS], box.dtype, LAYOUT), box)
        tiles_n = gl.cdiv(num_columns, COLUMNS)
        num_boxes = gl.cdiv(num_rows - first_row, WAVE) * tiles_n
        for number in range(gl.program_id(0), num_boxes, gl.num_programs(0)):
            row = first_row + number // tiles_n * WAVE
            _store_box(box, out_desc, num_rows, row, number % tiles_n * COLUMNS)
