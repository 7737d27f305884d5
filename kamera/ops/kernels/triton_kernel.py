"""The Triton kernel of the fused operator. Import it only if triton is installed."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _values(
    source, steps, lows, head, rows, cols, row_mask, some, s_head, s_token, g_head, g_token, g_feature,
    largest, BITS: tl.constexpr, TOKEN_GROUP: tl.constexpr, FEATURE_GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of the source in float32, decoded if it is codes. A group of 0 runs along the whole axis."""
    mask = row_mask[:, None] & some[None, :]
    if BITS == 0:
        at = head * s_head + rows[:, None] * s_token + cols[None, :]
        x = tl.load(source + at, mask=mask, other=0).to(tl.float32)
    else:
        if BITS == 8:
            at = head * s_head + rows[:, None] * s_token + cols[None, :]
            code = tl.load(source + at, mask=mask, other=0).to(tl.int32)
        else:  # two tokens to a byte
            at = head * s_head + (rows // 2)[:, None] * s_token + cols[None, :]
            code = (tl.load(source + at, mask=mask, other=0).to(tl.int32) >> ((rows % 2) * 4)[:, None]) & 15
        if TOKEN_GROUP == 0:  # one step per feature
            grid = head * g_head + cols[None, :] * g_feature
            known = some[None, :]
        elif FEATURE_GROUP == 0:  # one step per token
            grid = head * g_head + rows[:, None] * g_token
            known = row_mask[:, None]
        else:
            grid = head * g_head + (rows // TOKEN_GROUP)[:, None] * g_token
            grid += (cols // FEATURE_GROUP)[None, :] * g_feature
            known = mask
        step = tl.load(steps + grid, mask=known, other=0).to(tl.float32)
        low = tl.load(lows + grid, mask=known, other=0).to(tl.float32)
        x = tl.minimum(tl.maximum(code.to(tl.float32) * step + low, -largest), largest)
    return x


@triton.jit
def _factor(factor, width, k, rows, mask, FACTOR_BITS: tl.constexpr):
    """Entries ``[row, k]`` of a factor of ``width`` stored entries a row, or their unscaled codes (4 bits:
    two to a byte)."""
    if FACTOR_BITS == 4:
        byte = tl.load(factor + rows * width + k // 2, mask=mask, other=0).to(tl.int32)
        x = ((byte >> ((k % 2) * 4)) & 15) - 8
    else:
        x = tl.load(factor + rows * width + k, mask=mask, other=0)
    return x


@triton.jit
def _correct(
    x, left, right, left_scales, right_scales, rank, width, rows, features, row_mask, feature_mask,
    FACTOR_BITS: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``x + left @ right.T`` at the tile's rows and features.

    A bfloat16 holds a code exactly, but only 8 bits of a scaled one. So a scaled code is split into ``PARTS``
    numbers of 8 bits, each of which is multiplied.
    """
    for first in range(0, rank, BLOCK_R):
        k = first + tl.arange(0, BLOCK_R)
        some = k < rank
        u = _factor(left, width, k[None, :], rows[:, None], row_mask[:, None] & some[None, :], FACTOR_BITS)
        v = _factor(
            right, width, k[:, None], features[None, :], some[:, None] & feature_mask[None, :], FACTOR_BITS
        )
        if FACTOR_BITS > 0:
            scale = tl.load(left_scales + k, mask=some, other=0) * tl.load(
                right_scales + k, mask=some, other=0
            )  # a scale of 0 silences directions beyond the rank
            u = u.to(tl.float32)
            if not WIDEN:
                u = u.to(tl.bfloat16)
            v = v.to(tl.float32) * scale[:, None]
            for _ in tl.static_range(PARTS):
                part = v.to(tl.bfloat16)
                v -= part
                if WIDEN:
                    part = part.to(tl.float32)
                x = tl.dot(u, part, x, input_precision=PRECISION)
        else:
            if WIDEN:
                u = u.to(tl.float32)
                v = v.to(tl.float32)
            x = tl.dot(u, v, x, input_precision=PRECISION)
    return x


@triton.jit(do_not_specialize=["tokens"])
def serve_kernel(
    source, steps, lows, target, left, right, left_scales, right_scales, columns, cos, sin, tokens, width,
    s_layer, s_head, s_token, y_layer, y_head, y_token, g_layer, g_head, g_token, g_feature, largest,
    DIM: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BITS: tl.constexpr, TOKEN_GROUP: tl.constexpr, FEATURE_GROUP: tl.constexpr, PLAIN: tl.constexpr,
    FACTOR_BITS: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of tokens (grid axis 0) of one head (axis 1) of one layer (axis 2) of a channel.

    Tensors and strides are those of `kamera.ops.kernels.launches.Launch`; ``left`` and ``right`` hold
    ``width`` entries (of codes: bytes) a row, ``columns`` each layer's first column and its rank. ``BLOCK_R``
    0 means that no layer is patched, ``PAIRS`` 0 that no phase is rotated, ``PLAIN`` that bits are copied,
    ``EVEN`` that every rank divides by 8: loads of factors can then be wide. What a call does not need may
    be any tensor.
    """
    layer = tl.program_id(2).to(tl.int64)
    source += layer * s_layer
    target += layer * y_layer
    rank = 0
    if BITS > 0:
        steps += layer * g_layer
        lows += layer * g_layer
    if BLOCK_R > 0:
        start = tl.load(columns + 2 * layer)
        rank = tl.load(columns + 2 * layer + 1)
        if EVEN:
            start = tl.multiple_of(start, 8)
            rank = tl.multiple_of(rank, 8)
        if FACTOR_BITS > 0:
            left_scales += start
            right_scales += start
        if FACTOR_BITS == 4:
            start //= 2
        left += start
        right += start
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row_mask = rows < tokens
    out = target + head * y_head + rows[:, None] * y_token

    if PAIRS > 0:
        pair = tl.arange(0, BLOCK_P)
        c = tl.load(cos + pair, mask=pair < PAIRS, other=0)[None, :]
        s = tl.load(sin + pair, mask=pair < PAIRS, other=0)[None, :]
        if INTERLEAVED:
            both = tl.arange(0, 2 * BLOCK_P)
            some = both < 2 * PAIRS
            cols = START + both
            mask = row_mask[:, None] & some[None, :]
            x = _values(
                source, steps, lows, head, rows, cols, row_mask, some, s_head, s_token, g_head, g_token,
                g_feature, largest, BITS, TOKEN_GROUP, FEATURE_GROUP,
            )  # fmt: skip
            if BLOCK_R > 0:
                x = _correct(
                    x, left, right, left_scales, right_scales, rank, width, rows, head * DIM + cols,
                    row_mask, some, FACTOR_BITS, PARTS, BLOCK_R, WIDEN, PRECISION,
                )  # fmt: skip
            a, b = tl.split(tl.reshape(x, [BLOCK_T, BLOCK_P, 2]))
            y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [BLOCK_T, 2 * BLOCK_P])
            tl.store(out + cols[None, :], y.to(target.dtype.element_ty), mask=mask)
        else:
            some = pair < PAIRS
            first = START + pair
            second = START + PAIRS + pair
            mask = row_mask[:, None] & some[None, :]
            a = _values(
                source, steps, lows, head, rows, first, row_mask, some, s_head, s_token, g_head, g_token,
                g_feature, largest, BITS, TOKEN_GROUP, FEATURE_GROUP,
            )  # fmt: skip
            b = _values(
                source, steps, lows, head, rows, second, row_mask, some, s_head, s_token, g_head, g_token,
                g_feature, largest, BITS, TOKEN_GROUP, FEATURE_GROUP,
            )  # fmt: skip
            if BLOCK_R > 0:
                a = _correct(
                    a, left, right, left_scales, right_scales, rank, width, rows, head * DIM + first,
                    row_mask, some, FACTOR_BITS, PARTS, BLOCK_R, WIDEN, PRECISION,
                )  # fmt: skip
                b = _correct(
                    b, left, right, left_scales, right_scales, rank, width, rows, head * DIM + second,
                    row_mask, some, FACTOR_BITS, PARTS, BLOCK_R, WIDEN, PRECISION,
                )  # fmt: skip
            tl.store(out + first[None, :], (a * c - b * s).to(target.dtype.element_ty), mask=mask)
            tl.store(out + second[None, :], (b * c + a * s).to(target.dtype.element_ty), mask=mask)

    REST: tl.constexpr = DIM - 2 * PAIRS
    for block in tl.static_range(0, REST, BLOCK_D):
        index = block + tl.arange(0, BLOCK_D)
        some = index < REST
        if START == 0:
            cols = 2 * PAIRS + index
        elif START == REST:
            cols = index
        else:
            cols = tl.where(index < START, index, index + 2 * PAIRS)
        mask = row_mask[:, None] & some[None, :]
        if PLAIN:
            at = head * s_head + rows[:, None] * s_token + cols[None, :]
            tl.store(out + cols[None, :], tl.load(source + at, mask=mask, other=0), mask=mask)
        else:
            x = _values(
                source, steps, lows, head, rows, cols, row_mask, some, s_head, s_token, g_head, g_token,
                g_feature, largest, BITS, TOKEN_GROUP, FEATURE_GROUP,
            )  # fmt: skip
            if BLOCK_R > 0:
                x = _correct(
                    x, left, right, left_scales, right_scales, rank, width, rows, head * DIM + cols,
                    row_mask, some, FACTOR_BITS, PARTS, BLOCK_R, WIDEN, PRECISION,
                )  # fmt: skip
            tl.store(out + cols[None, :], x.to(target.dtype.element_ty), mask=mask)
