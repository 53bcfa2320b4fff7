"""
Fused Triton kernels for Gated Linear Attention, the gated delta rule (forward, backward and one-token step) and the
output head's loss.

    gla(q, k, v, g, scale=None, initial_state=None, segment_ids=None)                    -> o, final_state
    gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, segment_ids=None) -> o, final_state
    gla_step(q, k, v, g, state, scale=None)                                              -> o, state in place
    gated_delta_rule_step(q, k, v, g, beta, state, scale=None)                           -> o, state in place
    linear_cross_entropy(x, weight, targets)                                             -> mean loss

B batch, T time, H heads, K key dim per head, V value dim per head; q, k (B, T, H, K), v and o (B, T, H, V).
Tiles: BT tokens a chunk, BV values a program, NT chunks. model.py's chunked forms are the definition of both operators.
TRITON_INTERPRET=1 runs the same kernels on CPU tensors, in fp32.
"""
import os
from typing import Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634) # kernels use exp2 only: log gates are multiplied by log2(e) where first summed
BT = 64 # tokens a chunk
SIZES = (16, 32, 64, 128, 256) # widths of K and V that the kernels are built for
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# ----------------------------------------------------------------------------------------------------------------------
# the front door, shared by all four functions

def check(q, k, v, gates, state, segment_ids=None):
    """Refuse what cannot run, each in one sentence. `gates` are (name, tensor, shape, dtypes)."""
    assert q.is_cuda or INTERPRET, "q is on the CPU: the kernels need an NVIDIA GPU, use model.py's chunked form there"
    assert q.dtype in (torch.bfloat16, torch.float32), f"q must be bfloat16 or float32, got {q.dtype}"
    assert k.shape == q.shape and v.shape[:-1] == q.shape[:-1], \
        f"q and k must have one shape and v the same but the last, got {[tuple(x.shape) for x in (q, k, v)]}"
    assert 1 <= q.shape[-1] <= 256 and 1 <= v.shape[-1] <= 256, \
        f"K and V must be 1 to 256, got K={q.shape[-1]} and V={v.shape[-1]}"
    assert q.numel() > 0, f"q is empty, its shape is {tuple(q.shape)}"
    named = [("k", k, q.shape, (q.dtype,)), ("v", v, v.shape, (q.dtype,)), *gates]
    if state is not None:
        named.append(("state", state, (q.shape[0], q.shape[-2], q.shape[-1], v.shape[-1]), (torch.float32,)))
    if segment_ids is not None:
        named.append(("segment_ids", segment_ids, q.shape[:2], (torch.int32,)))
    for name, x, shape, dtypes in named:
        assert x.shape == torch.Size(shape), f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}"
        assert x.dtype in dtypes, f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}"
        assert x.device == q.device, f"{name} is on {x.device} and q on {q.device}"

def widen(x):
    """The last dimension zero-padded to the next of SIZES (exact: added keys and values are zero), made contiguous."""
    size = next(s for s in SIZES if s >= x.shape[-1])
    return (x if size == x.shape[-1] else F.pad(x, (0, size - x.shape[-1]))).contiguous() # padding by 0 would copy

def tiles(x, rows, cols):
    """Descriptor of `rows` x `cols` tiles of x (B, T, H, D), indexed [b, t, h * D + d]; the bound cuts a ragged T."""
    B, T, H, D = x.shape
    return TensorDescriptor(x, [B, T, H * D], [T * H * D, H * D, 1], [1, rows, cols])

# ----------------------------------------------------------------------------------------------------------------------
# Gated Linear Attention
#
# S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t,   S is (K, V), g <= 0                           (1)
#
# Split T into chunks of BT. Inside one, G_i = g_1 + ... + g_i, S is the state on entry and S' the one on exit:
#   qe = scale q e^G,   ke = k e^{G_last - G},   P_ij = scale sum_k q_ik k_jk e^{G_ik - G_jk} for j <= i             (2)
#   o = qe S + P v                                                                                                   (3)
#   S' = diag(e^{G_last}) S + ke^T v                                                                                 (4)
# Backward, with dS' the gradient of S':
#   dS = diag(e^{G_last}) dS' + qe^T do                                                                              (5)
#   dv = ke dS' + P^T do,   dP = do v^T for j <= i                                                                   (6)
#   dq_i = scale e^{G_i} (S do_i)        + scale sum_{j<=i} dP_ij k_j e^{G_i - G_j}                                  (7)
#   dk_j = e^{G_last - G_j} (dS' v_j)    + scale sum_{i>=j} dP_ij q_i e^{G_i - G_j}                                  (8)
#   a_j = k_j e^{G_last - G_j} (dS' v_j),   x_i = (q dq - k dk)_i + a_i
#   dg_t = sum_v (e^{G_last} S dS')_v + sum_{j<t} a_j + sum_{i>=t} x_i                                               (9)
# The sums are over the chunk: summed over all of T, (9) would lose its accuracy with T. The pairs i = j cancel in x and
# are left out of it, since their rounding alone is larger than a small dg.
#
# Ranges. qe and ke have no positive exponent. P is one product around the middle row m of the chunk,
#   P = scale (q e^E) (k e^{-E})^T,   E = G - G_m,                                                                  (10)
# and stays in range while |E| <= REACH. In a chunk that exceeds it ("strong", decided on the device) each pair j < i
# belongs to the level of its first differing bit: at the level of blocks of 2w rows, i lies in the late half, j in the
# early half, and r is the last early row. Then G_i - G_r and G_r - G_j are sums of g, <= 0 for gates of any strength:
#   X = e^{G - G_r} in late rows, e^{G_r - G} in early ones;   Z = X q in late rows, X k in early ones              (11)
#   P_ij = scale (Z Z^T)_ij,   X dP Z the intra part of dq in late rows,   X dP^T Z that of dk in early ones        (12)
# Documents. Where segment ids differ, P_ij = 0; rows outside the entering state's segment have qe = 0, those outside
# the leaving state's ke = 0; and e^{G_last} = 0 unless the two are one. Sums of g never cross a boundary: they go
# through L, L_ij = 1 for j < i of one segment, and E is taken from row m only in the segment of m, from the segment's
# start in the others, which are 32 rows at most. So one document's inputs do not touch another's outputs by a bit.
#
#   name       symbol                    shape            dtype    written by     read by
#   L          L                         (B, T, BT)       as q     lower          prep, strong, dP, grad
#   qe, ke     qe, ke                    (B, T, H, K)     as q     prep, strong   sweep
#   P          P                         (B, T, H, BT)    as q     prep, strong   sweep
#   middle     G_m in the segment of m   (B H, NT, K)     fp32     prep           strong, grad
#   leave      G_last - G = leave - E    (B H, NT, K)     fp32     prep           strong, grad
#   decay      e^{G_last}                (B H, NT, K)     fp32     prep           sweep, grad
#   h, dh      S^T, dS'^T                (B H, NT V, K)   as q     sweep          grad
#   dP         scale dP for j < i        (B, T, H, BT)    as q     dP             grad
# All but the last two rows are kept for backward, which computes h again. The state is held transposed, (V, K): it is
# then the first operand of each of its products and never leaves registers.
# Per token and head, forward and backward: 14 K V + BT (16 K + 6 V) FLOPs, 16 K + 9 V + 5 BT + 4 K V / BT values moved.

REACH = tl.constexpr(64.0) # e^64 is 6e27: times any q or k it fits bf16
PREC = tl.constexpr("tf32x3") # of fp32 products; bf16 products are exact

@triton.jit
def gla_segments(segment_ids, i_b, i_t, T, BT: tl.constexpr):
    """Of chunk i_t: the segment of each row (BT,), of the entering state, of row m and of the leaving state."""
    ids = segment_ids + i_b.to(tl.int64) * T
    t, end = i_t * BT, T - 1
    seg, first = tl.load(ids + tl.minimum(t + tl.arange(0, BT), end)), tl.load(ids + tl.maximum(t - 1, 0))
    return seg, first, tl.load(ids + tl.minimum(t + BT // 2 - 1, end)), tl.load(ids + tl.minimum(t + BT - 1, end))

@triton.jit
def gla_matsum(M, x, DT: tl.constexpr):
    """M x for M (BT, BT) of 0 and 1; where fp32 x meets bf16 M, as high + low parts: to 2^-17 of x."""
    M = M.to(DT)
    # (BT, BT) x (BT, *)
    if x.dtype == DT:
        s = tl.dot(M, x, input_precision=PREC)
    else:
        high = x.to(DT)
        s = tl.dot(M, high, input_precision=PREC)
        s = tl.dot(M, (x - high.to(tl.float32)).to(DT), s, input_precision=PREC)
    return s

@triton.jit
def gla_rows(i_b, i_h, i_t, i_k, T, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Offsets of a chunk's rows in a (B, T, H, K) tensor, keys from i_k on: (BT, BK); and which rows are below T."""
    t = i_t * BT + tl.arange(0, BT)
    return (((i_b.to(tl.int64) * T + t) * H + i_h) * K + i_k)[:, None] + tl.arange(0, BK)[None, :], (t < T)[:, None]

@triton.jit(do_not_specialize=["T"])
def gla_lower_kernel(segment_ids, L, T, BT: tl.constexpr):
    """L (B, T, BT): L_ij = 1 where j < i and both rows of the chunk are of one segment, else 0. Grid (B, NT)."""
    i_b, i_t = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, BT)
    seg, first, mid, last = gla_segments(segment_ids, i_b, i_t, T, BT)
    row, live = gla_rows(i_b, 0, i_t, 0, T, 1, BT, BT, BT)
    b_L = tl.where((o[None, :] < o[:, None]) & (seg[:, None] == seg[None, :]), 1.0, 0.0)
    tl.store(L + row, b_L.to(L.dtype.element_ty), mask=live)

@triton.jit
def gla_level(level, b_q, b_k, b_g, seg, DT: tl.constexpr, BT: tl.constexpr):
    """X and Z of (11) at a level, which rows are late, and which pairs (i, j) belong to it."""
    o = tl.arange(0, BT)
    w = BT >> (level + 1)
    late = o // w % 2 == 1
    r = o // (2 * w) * 2 * w + w - 1
    after, before = o[None, :] > r[:, None], o[None, :] <= r[:, None]
    M = tl.where(late[:, None], after & (o[None, :] <= o[:, None]), before & (o[None, :] > o[:, None]))
    M = M & (seg[:, None] == seg[None, :])
    X = tl.exp(gla_matsum(tl.where(M, 1.0, 0.0), b_g, DT)) # <= 1
    Z = (tl.where(late[:, None], b_q, b_k).to(tl.float32) * X).to(DT)
    pair = late[:, None] & ~late[None, :] & (r[:, None] == r[None, :]) & (seg[:, None] == seg[None, :])
    return X, Z, late, pair

@triton.jit(do_not_specialize=["T"])
def gla_prep_kernel(q, k, g, segment_ids, L, qe, ke, P, middle, leave, decay, strong, scale, T, H: tl.constexpr,
                    K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """Eq. (2) of a chunk by (10), and whether it is strong, thus to be done again. Grid (B H, NT)."""
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_c = i_bh.to(tl.int64) * tl.num_programs(1) + i_t # of a (B H, NT, *) tensor
    DT: tl.constexpr = q.dtype.element_ty
    o = tl.arange(0, BT)
    early = (o < BT // 2)[:, None] # rows up to m
    seg, first, mid, last = gla_segments(segment_ids, i_b, i_t, T, BT)
    m_first, m_mid, m_last = (seg == first)[:, None], (seg == mid)[:, None], (seg == last)[:, None]
    o_t, m_t = gla_rows(i_b, 0, i_t, 0, T, 1, BT, BT, BT)
    b_L = tl.load(L + o_t, mask=m_t, other=0.0)
    b_P = tl.zeros([BT, BT], dtype=tl.float32)
    reach = tl.zeros([BT], dtype=tl.float32)
    for i_k in tl.range(0, K, BK, num_stages=STAGES):
        row, live = gla_rows(i_b, i_h, i_t, i_k, T, H, K, BT, BK)
        b_q = tl.load(q + row, mask=live, other=0.0)
        b_k = tl.load(k + row, mask=live, other=0.0)
        b_g = tl.load(g + row, mask=live, other=0.0)
        b_middle = tl.sum(tl.where(early & m_mid, b_g.to(tl.float32), 0.0), 0)
        b_leave = tl.sum(tl.where(m_last & ~(early & (last == mid)), b_g.to(tl.float32), 0.0), 0)
        b_enter = b_middle * (first == mid).to(tl.float32)
        E = gla_matsum(b_L, b_g, DT) + b_g - tl.where(m_mid, b_middle[None, :], 0.0)
        reach = tl.maximum(reach, tl.max(tl.abs(E), 1))
        qx, kx = b_q * tl.exp(E), b_k * tl.exp(-E) # q e^E, k e^{-E}: infinite in some strong chunks
        b_qe = tl.where(m_first, qx * (scale * tl.exp(b_enter))[None, :], 0.0)
        tl.store(qe + row, b_qe.to(DT), mask=live)
        b_ke = tl.where(m_last, kx * tl.exp(b_leave)[None, :], 0.0)
        tl.store(ke + row, b_ke.to(DT), mask=live)
        o_c = i_c * K + i_k + tl.arange(0, BK)
        tl.store(middle + o_c, b_middle)
        tl.store(leave + o_c, b_leave)
        tl.store(decay + o_c, tl.exp(b_enter + b_leave) * (first == last).to(tl.float32))
        # (10): (BT, BK) x (BK, BT); above the diagonal it may overflow
        b_P = tl.dot(qx.to(DT), tl.trans(kx.to(DT)), b_P, input_precision=PREC)
    b_P = tl.where((b_L > 0) | (o[:, None] == o[None, :]), b_P * scale, 0.0)
    o_t, m_t = gla_rows(i_b, i_h, i_t, 0, T, H, BT, BT, BT)
    tl.store(P + o_t, b_P.to(DT), mask=m_t)
    tl.store(strong + i_c, (tl.max(reach, 0) > REACH).to(tl.int32))

@triton.jit(do_not_specialize=["T"])
def gla_strong_kernel(q, k, g, segment_ids, L, qe, ke, P, middle, leave, strong, scale, T, H: tl.constexpr,
                      K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Eq. (2) of a strong chunk, P by (12). Grid (B H, NT); returns at once where the chunk is not strong."""
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_c = i_bh.to(tl.int64) * tl.num_programs(1) + i_t
    if tl.load(strong + i_c) == 0:
        return
    DT: tl.constexpr = q.dtype.element_ty
    o = tl.arange(0, BT)
    seg, first, mid, last = gla_segments(segment_ids, i_b, i_t, T, BT)
    o_t, m_t = gla_rows(i_b, 0, i_t, 0, T, 1, BT, BT, BT)
    b_L = tl.load(L + o_t, mask=m_t, other=0.0)
    b_P = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        row, live = gla_rows(i_b, i_h, i_t, i_k, T, H, K, BT, BK)
        b_q = tl.load(q + row, mask=live, other=0.0)
        b_k = tl.load(k + row, mask=live, other=0.0)
        b_g = tl.load(g + row, mask=live, other=0.0)
        o_c = i_c * K + i_k + tl.arange(0, BK)
        b_middle = tl.load(middle + o_c)
        E = gla_matsum(b_L, b_g, DT) + b_g - tl.where((seg == mid)[:, None], b_middle[None, :], 0.0)
        G = E + (b_middle * (first == mid).to(tl.float32))[None, :]
        b_qe = tl.where((seg == first)[:, None], b_q * tl.exp(G) * scale, 0.0)
        b_ke = tl.where((seg == last)[:, None], b_k * tl.exp(tl.load(leave + o_c)[None, :] - E), 0.0)
        tl.store(qe + row, b_qe.to(DT), mask=live)
        tl.store(ke + row, b_ke.to(DT), mask=live)
        diagonal = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
        b_P += tl.where(o[:, None] == o[None, :], diagonal[:, None], 0.0)
        for level in range(6): # BT = 2^6
            X, Z, late, pair = gla_level(level, b_q, b_k, b_g, seg, DT, BT)
            # Z Z^T: (BT, BK) x (BK, BT)
            b_P += tl.where(pair, tl.dot(Z, tl.trans(Z), input_precision=PREC), 0.0)
    o_t, m_t = gla_rows(i_b, i_h, i_t, 0, T, H, BT, BT, BT)
    tl.store(P + o_t, (b_P * scale).to(DT), mask=m_t)

@triton.jit(do_not_specialize=["T", "n"])
def gla_sweep_kernel(x, a, c, P, y, h, S0, SN, decay, part, part_decay, T, n, H: tl.constexpr, K: tl.constexpr,
                     V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, OUT: tl.constexpr,
                     STATES: tl.constexpr, LOCAL: tl.constexpr, STAGES: tl.constexpr):
    """
    The state through the chunks, S <- decay S + a^T x: (4) with a = ke, x = v, or REVERSE (5) with a = qe, x = do.
    OUT writes y = c S + P x with c = qe, (3), or y = c S + P^T x with c = ke, (6); STATES writes S as each chunk meets
    it. Grid (B H V/BV, segments of n chunks): LOCAL leaves each segment's S from zero, and its decay, in part and
    part_decay; the full pass then starts each segment from what those before it leave.
    """
    i_bh, i_v, i_s = tl.program_id(0) // (V // BV), tl.program_id(0) % (V // BV) * BV, tl.program_id(1)
    i_b, i_h, NT = i_bh // H, i_bh % H, tl.cdiv(T, BT)
    BH = tl.num_programs(0).to(tl.int64) // (V // BV)
    o_k = tl.arange(0, K)
    tile = (i_v + tl.arange(0, BV))[:, None] * K + o_k[None, :] # of a (V, K) state
    S = tl.zeros([BV, K], dtype=tl.float32)
    if not LOCAL:
        if S0 is not None:
            S = tl.load(S0 + i_bh.to(tl.int64) * V * K + tile)
        if part is not None:
            for i in range(i_s):
                S *= tl.load(part_decay + (i * BH + i_bh) * K + o_k)[None, :]
                S += tl.load(part + (i * BH + i_bh) * V * K + tile)
    total = tl.zeros([K], dtype=tl.float32) + 1.0 # the segment's decay

    for j in tl.range(i_s * n, tl.minimum(i_s * n + n, NT), num_stages=STAGES):
        i_t = NT - 1 - j if REVERSE else j
        b_a = a.load([i_b, i_t * BT, i_h * K]).reshape(BT, K)
        b_x = x.load([i_b, i_t * BT, i_h * V + i_v]).reshape(BT, BV)
        b_decay = tl.load(decay + (i_bh.to(tl.int64) * NT + i_t) * K + o_k)
        if STATES:
            h.store([i_bh, i_t * V + i_v, 0], S.to(b_a.dtype).reshape(1, BV, K))
        if OUT:
            b_c = c.load([i_b, i_t * BT, i_h * K]).reshape(BT, K)
            b_P = P.load([i_b, i_t * BT, i_h * BT]).reshape(BT, BT)
            # (3) transposed: (BV, K) x (K, BT) + (BV, BT) x (BT, BT)
            yT = tl.dot(S.to(b_a.dtype), tl.trans(b_c), input_precision=PREC)
            yT = tl.dot(tl.trans(b_x), b_P if REVERSE else tl.trans(b_P), yT, input_precision=PREC)
            y.store([i_b, i_t * BT, i_h * V + i_v], tl.trans(yT).to(b_a.dtype).reshape(1, BT, BV))
        # (4) or (5) transposed: (BV, BT) x (BT, K)
        S = tl.dot(tl.trans(b_x), b_a, S * b_decay[None, :], input_precision=PREC)
        if LOCAL:
            total *= b_decay
    if LOCAL:
        tl.store(part + (i_s * BH + i_bh) * V * K + tile, S)
        tl.store(part_decay + (i_s * BH + i_bh) * K + o_k, total) # the same from every block of V
    elif i_s == tl.num_programs(1) - 1:
        tl.store(SN + i_bh.to(tl.int64) * V * K + tile, S)

@triton.jit(do_not_specialize=["T"])
def gla_dP_kernel(v, do, L, dP, diagonal, scale, T, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                  BV: tl.constexpr, STAGES: tl.constexpr):
    """scale dP of (6) in a chunk, its diagonal (B, T, H) apart, in fp32. Grid (B H, NT)."""
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_b, i_h, t0 = i_bh // H, i_bh % H, i_t * BT
    b_dP = tl.zeros([BT, BT], dtype=tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_v = v.load([i_b, t0, i_h * V + i_v]).reshape(BT, BV)
        b_do = do.load([i_b, t0, i_h * V + i_v]).reshape(BT, BV)
        # (BT, BV) x (BV, BT)
        b_dP = tl.dot(b_do, tl.trans(b_v), b_dP, input_precision=PREC)
    b_dP *= scale
    o = tl.arange(0, BT)
    b_diagonal = tl.sum(tl.where(o[:, None] == o[None, :], b_dP, 0.0), 1)
    tl.store(diagonal + (i_b.to(tl.int64) * T + t0 + o) * H + i_h, b_diagonal, mask=t0 + o < T)
    row, live = gla_rows(i_b, 0, i_t, 0, T, 1, BT, BT, BT)
    b_dP = tl.where(tl.load(L + row, mask=live, other=0.0) > 0, b_dP, 0.0)
    row, live = gla_rows(i_b, i_h, i_t, 0, T, H, BT, BT, BT)
    tl.store(dP + row, b_dP.to(dP.dtype.element_ty), mask=live)

@triton.jit(do_not_specialize=["T"])
def gla_grad_kernel(q, k, v, g, segment_ids, do, L, dP, diagonal, middle, leave, decay, strong, h, dh, dq, dk, dg,
                    scale, T, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                    BV: tl.constexpr, STRONG: tl.constexpr, STAGES: tl.constexpr):
    """Eqs. (7) to (9) of a chunk for BK keys. Grid (B H K/BK, NT); returns at once where the chunk is not as STRONG."""
    i_bh, i_k, i_t = tl.program_id(0) // (K // BK), tl.program_id(0) % (K // BK) * BK, tl.program_id(1)
    i_b, i_h, t0 = i_bh // H, i_bh % H, i_t * BT
    i_c = i_bh.to(tl.int64) * tl.num_programs(1) + i_t
    if tl.load(strong + i_c) != STRONG:
        return
    DT: tl.constexpr = v.dtype
    # by pointer: these loads stay in flight through the loop
    row, live = gla_rows(i_b, i_h, i_t, i_k, T, H, K, BT, BK)
    b_q = tl.load(q + row, mask=live, other=0.0)
    b_k = tl.load(k + row, mask=live, other=0.0)
    b_g = tl.load(g + row, mask=live, other=0.0)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    SdS = tl.zeros([16, BK], dtype=tl.float32) # sum_v S dS', in 16 parts
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_v = v.load([i_b, t0, i_h * V + i_v]).reshape(BT, BV)
        b_do = do.load([i_b, t0, i_h * V + i_v]).reshape(BT, BV)
        b_h = h.load([i_bh, i_t * V + i_v, i_k]).reshape(BV, BK)
        b_dh = dh.load([i_bh, i_t * V + i_v, i_k]).reshape(BV, BK)
        SdS += tl.sum((b_h.to(tl.float32) * b_dh.to(tl.float32)).reshape(BV // 16, 16, BK), 0)
        # S do and dS' v: (BT, BV) x (BV, BK)
        b_dq = tl.dot(b_do, b_h, b_dq, input_precision=PREC)
        b_dk = tl.dot(b_v, b_dh, b_dk, input_precision=PREC)

    seg, first, mid, last = gla_segments(segment_ids, i_b, i_t, T, BT)
    m_first, m_last = (seg == first)[:, None], (seg == last)[:, None]
    o_c = i_c * K + i_k + tl.arange(0, BK)
    b_middle, b_leave, b_y = tl.load(middle + o_c), tl.load(leave + o_c), tl.load(decay + o_c) * tl.sum(SdS, 0)
    b_enter = b_middle * (first == mid).to(tl.float32)
    t = t0 + tl.arange(0, BT)
    b_diagonal = tl.load(diagonal + (i_b.to(tl.int64) * T + t) * H + i_h, mask=t < T, other=0.0)[:, None]
    o_t, m_t = gla_rows(i_b, i_h, i_t, 0, T, H, BT, BT, BT)
    b_dP = tl.load(dP + o_t, mask=m_t, other=0.0) # zero on the diagonal and above
    o_t, m_t = gla_rows(i_b, 0, i_t, 0, T, 1, BT, BT, BT)
    b_L = tl.load(L + o_t, mask=m_t, other=0.0)
    E = gla_matsum(b_L, b_g, DT) + b_g - tl.where((seg == mid)[:, None], b_middle[None, :], 0.0)
    if STRONG:
        b_dq = tl.where(m_first, b_dq * tl.exp(E + b_enter[None, :]) * scale, 0.0)
        b_dk = tl.where(m_last, b_dk * tl.exp(b_leave[None, :] - E), 0.0)
        b_a = b_k * b_dk
        both = b_dP + tl.trans(b_dP)
        for level in range(6):
            X, Z, late, pair = gla_level(level, b_q, b_k, b_g, seg, DT, BT)
            # (12): (BT, BT) x (BT, BK)
            XdPZ = X * tl.dot(tl.where(pair | tl.trans(pair), both, 0.0), Z, input_precision=PREC)
            b_dq += tl.where(late[:, None], XdPZ, 0.0)
            b_dk += tl.where(late[:, None], 0.0, XdPZ)
    else:
        # (7) and (8) around row m, as (10): (BT, BT) x (BT, BK)
        X, Y = tl.exp(E), tl.exp(-E)
        kx = b_k * Y
        b_dq = tl.where(m_first, b_dq * (scale * tl.exp(b_enter))[None, :], 0.0)
        b_dq = tl.dot(b_dP, kx.to(DT), b_dq, input_precision=PREC) * X
        b_dk = tl.where(m_last, b_dk * tl.exp(b_leave)[None, :], 0.0)
        b_a = kx * b_dk
        b_dk = tl.dot(tl.trans(b_dP), (b_q * X).to(DT), b_dk, input_precision=PREC) * Y
    tl.store(dq + row, (b_dq + b_diagonal * b_k).to(DT), mask=live)
    tl.store(dk + row, (b_dk + b_diagonal * b_q).to(DT), mask=live)
    # (9), L of j < i: (BT, BT) x (BT, BK)
    b_x = b_q * b_dq - (b_k * b_dk - b_a)
    b_dg = gla_matsum(tl.trans(b_L), b_x, DT) + b_x + b_y[None, :]
    b_dg = tl.dot(b_L, b_a.to(DT), b_dg, input_precision=PREC)
    tl.store(dg + row, b_dg.to(dg.dtype.element_ty), mask=live)

@triton.jit
def gla_step_kernel(q, k, v, g, state, o, scale, K, V, sb, sh, sk, sv, H: tl.constexpr, BK: tl.constexpr,
                    BV: tl.constexpr):
    """Eq. (1), one token. state (B, H, K, V) with strides sb, sh, sk, sv is updated in place. Grid (B H, V/BV)."""
    i_bh = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    b_q = tl.load(q + i_bh * K + o_k, mask=m_k, other=0.0).to(tl.float32) * scale
    b_k = tl.load(k + i_bh * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_g = tl.load(g + i_bh * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_bh * V + o_v, mask=m_v, other=0.0).to(tl.float32)
    tile = state + i_bh // H * sb + i_bh % H * sh + o_v[:, None] * sv + o_k[None, :] * sk
    mask = m_v[:, None] & m_k[None, :]
    S = tl.load(tile, mask=mask, other=0.0)
    S = S * tl.exp(b_g)[None, :] + b_k[None, :] * b_v[:, None]
    tl.store(tile, S, mask=mask)
    tl.store(o + i_bh * V + o_v, tl.sum(S * b_q[None, :], 1).to(o.dtype.element_ty), mask=m_v)

def gla_launch(K, V, dtype):
    """
    Launch settings of prep, sweep with outputs, sweep of states alone, grad. Fixed, and checked against fp64 on an H200
    but for fp32 with K = 256, which ran in the interpreter only; K and V are 64, 128 or 256. bf16 with K up to 128 is the
    fast case and takes up to 217 KB of shared memory on Hopper; Ampere, which has no TMA, stays under 99 KB with the
    same tiles (compiled for sm_80, not run).
    """
    run = dict(enable_fp_fusion=True)
    prep = dict(BK=64, STAGES=3, num_warps=4, **run)
    grad = dict(BK=64, BV=64, STAGES=3 if dtype == torch.bfloat16 else 2, num_warps=4, **run)
    if dtype == torch.bfloat16 and K <= 128:
        out = dict(BV=min(V, 128), STAGES=3, num_warps=8, **run)
        states = dict(BV=64, STAGES=3, num_warps=4, **run)
    elif dtype == torch.bfloat16 or K <= 128:
        out = dict(BV=32, STAGES=2, num_warps=8, **run)
        states = dict(BV=32, STAGES=2, num_warps=4, **run)
    else:
        out = dict(BV=16, STAGES=1, num_warps=4, **run)
        states = dict(BV=32, STAGES=2, num_warps=4, **run)
    return prep, out, states, grad

def gla_split(programs, NT, device):
    """(segments, chunks in each) of a sweep of NT chunks: enough that programs x segments fill the device."""
    slots = 1 if INTERPRET else torch.cuda.get_device_properties(device).multi_processor_count
    n = triton.cdiv(NT, max(1, min(slots // programs, NT // 4)))
    return triton.cdiv(NT, n), n

def gla_sweep(x, a, c, P, y, h, S0, decay, launch, reverse):
    """The passes of gla_sweep_kernel: fills y and h where given, returns the last state (B, H, V, K), fp32."""
    B, T, H, V, K = *x.shape, a.shape[-1]
    NT, BV, BH = triton.cdiv(T, BT), launch["BV"], B * H
    NS, n = gla_split(BH * (V // BV), NT, x.device)
    SN = x.new_empty(B, H, V, K, dtype=torch.float32)
    part = x.new_empty(NS - 1, BH, V, K, dtype=torch.float32) if NS > 1 else None
    part_decay = x.new_empty(NS - 1, BH, K, dtype=torch.float32) if NS > 1 else None
    io = [tiles(x, BT, BV), tiles(a, BT, K), None, None, None, None, S0, SN, decay, part, part_decay, T, n]
    shape = dict(H=H, K=K, V=V, BT=BT, REVERSE=reverse, **launch)
    if NS > 1:
        gla_sweep_kernel[(BH * (V // BV), NS - 1)](*io, OUT=False, STATES=False, LOCAL=True, **shape)
    if y is not None:
        io[2:5] = tiles(c, BT, K), tiles(P, BT, BT), tiles(y, BT, BV)
    if h is not None:
        io[5] = TensorDescriptor.from_tensor(h, [1, BV, K])
    gla_sweep_kernel[(BH * (V // BV), NS)](*io, OUT=y is not None, STATES=h is not None, LOCAL=False, **shape)
    return SN

@torch.library.custom_op("kernels::gla_fwd", mutates_args=())
def gla_fwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, S0: Optional[Tensor], segment_ids: Tensor
            ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o and the last state (B, H, V, K); for backward L, qe, ke, P, gates (middle, leave, decay) and strong."""
    (B, T, H, K), V, NT = q.shape, v.shape[-1], triton.cdiv(q.shape[1], BT)
    qe, ke, o, P = torch.empty_like(q), torch.empty_like(q), torch.empty_like(v), q.new_empty(B, T, H, BT)
    L = q.new_empty(B, T, BT)
    gates = q.new_empty(3, B * H, NT, K, dtype=torch.float32) # middle, leave, decay
    strong = q.new_empty(B * H, NT, dtype=torch.int32)
    prep, out, _, _ = gla_launch(K, V, q.dtype)
    io = q, k, g, segment_ids, L, qe, ke, P
    with torch.cuda.device_of(q):
        gla_lower_kernel[(B, NT)](segment_ids, L, T, BT=BT, num_warps=4)
        gla_prep_kernel[(B * H, NT)](*io, *gates, strong, scale, T, H=H, K=K, BT=BT, **prep)
        gla_strong_kernel[(B * H, NT)](*io, *gates[:2], strong, scale, T, H=H, K=K, BT=BT, BK=prep["BK"], num_warps=4,
                                       num_stages=1, enable_fp_fusion=True)
        SN = gla_sweep(v, ke, qe, P, o, None, S0, gates[2], out, reverse=False)
    return o, SN, L, qe, ke, P, gates, strong

@gla_fwd.register_fake
def _(q, k, v, g, scale, S0, segment_ids):
    (B, T, H, K), V, NT, f32 = q.shape, v.shape[-1], triton.cdiv(q.shape[1], BT), torch.float32
    return (torch.empty_like(v), q.new_empty(B, H, V, K, dtype=f32), q.new_empty(B, T, BT), torch.empty_like(q),
            torch.empty_like(q), q.new_empty(B, T, H, BT), q.new_empty(3, B * H, NT, K, dtype=f32),
            q.new_empty(B * H, NT, dtype=torch.int32))

@torch.library.custom_op("kernels::gla_bwd", mutates_args=())
def gla_bwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, S0: Optional[Tensor], segment_ids: Tensor,
            L: Tensor, qe: Tensor, ke: Tensor, P: Tensor, gates: Tensor, strong: Tensor, do: Tensor,
            dSN: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg and the gradient (B, H, V, K) of the initial state. The states are computed again, not stored."""
    (B, T, H, K), V, NT = q.shape, v.shape[-1], triton.cdiv(q.shape[1], BT)
    dq, dk, dv, dg = map(torch.empty_like, (q, k, v, g))
    h, dh = q.new_empty(B * H, NT * V, K), q.new_empty(B * H, NT * V, K)
    dP, diagonal = q.new_empty(B, T, H, BT), q.new_empty(B, T, H, dtype=torch.float32)
    _, out, states, grad = gla_launch(K, V, q.dtype)
    BK, BV = grad["BK"], grad["BV"]
    with torch.cuda.device_of(q):
        gla_sweep(v, ke, None, None, None, h, S0, gates[2], states, reverse=False)
        dS0 = gla_sweep(do, qe, ke, P, dv, dh, dSN, gates[2], out, reverse=True)
        tdo, tv = tiles(do, BT, BV), tiles(v, BT, BV)
        gla_dP_kernel[(B * H, NT)](tv, tdo, L, dP, diagonal, scale, T, H=H, V=V, BT=BT, BV=BV, STAGES=3, num_warps=4,
                                   enable_fp_fusion=True)
        states = [TensorDescriptor.from_tensor(x, [1, BV, BK]) for x in (h, dh)]
        for is_strong in (False, True):
            gla_grad_kernel[(B * H * (K // BK), NT)](
                q, k, tv, g, segment_ids, tdo, L, dP, diagonal, *gates, strong, *states, dq, dk, dg, scale, T,
                H=H, K=K, V=V, BT=BT, STRONG=is_strong, **grad)
    return dq, dk, dv, dg, dS0

@gla_bwd.register_fake
def _(q, k, v, g, scale, S0, segment_ids, L, qe, ke, P, gates, strong, do, dSN):
    return *map(torch.empty_like, (q, k, v, g)), q.new_empty(q.shape[0], q.shape[2], v.shape[-1], q.shape[-1],
                                                             dtype=torch.float32)

def gla_save(ctx, inputs, output):
    q, k, v, g, scale, S0, segment_ids = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, S0, segment_ids, *output[2:])
    ctx.scale = scale

def gla_backward(ctx, do, dSN, *_):
    q, k, v, g, S0, segment_ids, *saved = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do.contiguous() # only the final state may feed the loss
    dSN = None if dSN is None else dSN.contiguous()
    dq, dk, dv, dg, dS0 = gla_bwd(q, k, v, g, ctx.scale, S0, segment_ids, *saved, do, dSN)
    return dq, dk, dv, dg, None, None if S0 is None else dS0, None

gla_fwd.register_autograd(gla_backward, setup_context=gla_save)

def gla_widen(x):
    """`widen`, to 64 at least: narrower tiles are not worth launch settings of their own."""
    return widen(x if x.shape[-1] >= 64 else F.pad(x, (0, 64 - x.shape[-1])))

def gla(q, k, v, g, scale=None, initial_state=None, segment_ids=None):
    """
    Gated Linear Attention (Yang et al. 2024, arXiv:2312.06635), eq. (1) over T tokens: returns o, final_state.

    q, k (B, T, H, K) and v (B, T, H, V), all bf16 or all fp32; g (B, T, H, K), log decay <= 0, bf16 or fp32; scale
    defaults to K**-0.5. initial_state and final_state (B, H, K, V), fp32, both differentiable. segment_ids (B, T)
    int32, non-decreasing: the state restarts at zero where the id changes; initial_state belongs to the first token's
    segment. K and V from 1 to 256. What cannot run raises an AssertionError that says why.
    """
    check(q, k, v, [("g", g, q.shape, (torch.bfloat16, torch.float32))], initial_state, segment_ids)
    B, T, H, K, V = *q.shape, v.shape[-1]
    scale = K**-0.5 if scale is None else float(scale)
    S0 = None if initial_state is None else gla_widen(gla_widen(initial_state).transpose(-1, -2)) # held as (V, K)
    if segment_ids is None:
        segment_ids = torch.zeros(B, T, dtype=torch.int32, device=q.device)
    o, SN, *_ = gla_fwd(gla_widen(q), gla_widen(k), gla_widen(v), gla_widen(g), scale, S0, segment_ids.contiguous())
    if (K, V) != (SN.shape[-1], SN.shape[-2]): # the gradient of a slice is a copy
        o, SN = o[..., :V], SN[..., :V, :K]
    return o, SN.transpose(-1, -2)

@torch.library.custom_op("kernels::gla_step", mutates_args={"state"})
def gla_step_op(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    B, H, K, V = state.shape
    o, BV = torch.empty_like(v), 32
    with torch.cuda.device_of(q):
        gla_step_kernel[(B * H, triton.cdiv(V, BV))](
            q, k, v, g, state, o, scale, K, V, *state.stride(), H=H, BK=triton.next_power_of_2(K), BV=BV,
            num_warps=4, enable_fp_fusion=True)
    return o

@gla_step_op.register_fake
def _(q, k, v, g, state, scale):
    return torch.empty_like(v)

def gla_step(q, k, v, g, state, scale=None):
    """One token of `gla`: q, k, g (B, H, K), v (B, H, V); state (B, H, K, V), fp32, is updated in place. Returns o."""
    check(q, k, v, [("g", g, q.shape, (torch.bfloat16, torch.float32))], state)
    scale = q.shape[-1]**-0.5 if scale is None else float(scale)
    return gla_step_op(*(x.contiguous() for x in (q, k, v, g)), state, scale)

# ----------------------------------------------------------------------------------------------------------------------
# the gated delta rule

# ----------------------------------------------------------------------------------------------------------------------
# the short convolution in front of the mixer
#
#   p_t = sum_{s<4} w_s x_{t-s} over the tokens of t's segment,   y_t = silu(p_t) = p_t sigma(p_t),            (1)
# and for q and k the unit vector z_t = r_t y_t, r_t = (|y_t|^2 + 1e-6)^{-1/2}. Backward:
#   dy_t = r_t dz_t - r_t^3 (dz_t . y_t) y_t,   dp_t = sigma(p_t) (1 + p_t (1 - sigma(p_t))) dy_t,             (2)
#   dx_t = sum_s w_s dp_{t+s} over t's segment,   dw_s = sum_t dp_t x_{t-s}.                                   (3)
# Both directions walk over the tokens with the last four in registers, so each tensor crosses the memory bus once. A
# program walks over CONV_ROWS stretches of CONV_TOKENS tokens side by side, beginning four tokens outside of each; it
# loads four tokens at a time, ahead of their use, to have enough bytes under way.

CONV_TOKENS, CONV_ROWS, TAPS = 128, 4, 4

@triton.jit
def stretch(n_blocks, T, R: tl.constexpr, TOKENS: tl.constexpr):
    """Row of token 0 and first token of this program's R stretches, (R, 1); one that does not exist is past the end."""
    i_n = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    per_row = tl.cdiv(T, TOKENS)
    return (i_n // per_row).to(tl.int64) * T, tl.where(i_n < n_blocks, (i_n % per_row) * TOKENS, T + 4)

@triton.jit
def four(x, row, t, T, stride, mask, step: tl.constexpr):
    """x's rows of tokens t, t + step, t + 2 step and t + 3 step; zero where there is no such token."""
    t_1, t_2, t_3 = t + step, t + 2 * step, t + 3 * step
    return (tl.load(x + (row + t) * stride, mask=mask & (t >= 0) & (t < T), other=0),
            tl.load(x + (row + t_1) * stride, mask=mask & (t_1 >= 0) & (t_1 < T), other=0),
            tl.load(x + (row + t_2) * stride, mask=mask & (t_2 >= 0) & (t_2 < T), other=0),
            tl.load(x + (row + t_3) * stride, mask=mask & (t_3 >= 0) & (t_3 < T), other=0))

@triton.jit
def conv_fwd_kernel(x, w, seg, z, n_blocks, T, stride, offset, total, UNIT: tl.constexpr, WIDTH: tl.constexpr,
                    D: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr):
    """Eq. (1) for WIDTH channels of R stretches. Grid (stretches / R, channels / WIDTH)."""
    row, t_0 = stretch(n_blocks, T, R, TOKENS)
    o_d = tl.program_id(1) * WIDTH + tl.arange(0, D)[None, :]
    m_d = (tl.arange(0, D)[None, :] < WIDTH) & (o_d < total)
    w_3, w_2, w_1, w_0 = four(w + offset * 4 + o_d * 4, 0, 0, 4, 1, m_d, 1) # in memory the current token's is last
    x_1, x_2, x_3 = tl.zeros([R, D], tl.float32), tl.zeros([R, D], tl.float32), tl.zeros([R, D], tl.float32)
    id_1 = tl.zeros([R, 1], tl.int32)
    for i in range(-4, TOKENS, 4):
        xs = four(x + offset + o_d, row, t_0 + i, T, stride, m_d, 1)
        if seg is not None:
            ids = four(seg, row, t_0 + i, T, 1, True, 1)
        for j in tl.static_range(4):
            t = t_0 + i + j
            x_0 = xs[j].to(tl.float32)
            if seg is not None: # a new segment forgets the tokens before it
                same = tl.where(ids[j] == id_1, 1.0, 0.0)
                x_1, x_2, x_3, id_1 = x_1 * same, x_2 * same, x_3 * same, ids[j]
            b_p = w_0 * x_0 + w_1 * x_1 + w_2 * x_2 + w_3 * x_3
            b_z = b_p * tl.sigmoid(b_p)
            if UNIT:
                b_z *= tl.rsqrt(tl.sum(b_z * b_z, 1, keep_dims=True) + 1e-6)
            tl.store(z + (row + t) * total + o_d, b_z.to(z.dtype.element_ty), mask=m_d & (i >= 0) & (t < T))
            x_1, x_2, x_3 = x_0, x_1, x_2

@triton.jit
def conv_bwd_kernel(x, w, seg, dz, dx, dw, n_blocks, T, stride, offset, total, UNIT: tl.constexpr,
                    WIDTH: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr):
    """Eq. (2) and (3), from the last token to the first; dw is a partial sum a program. Grid as forward."""
    row, t_0 = stretch(n_blocks, T, R, TOKENS)
    o_d = tl.program_id(1) * WIDTH + tl.arange(0, D)[None, :]
    m_d = (tl.arange(0, D)[None, :] < WIDTH) & (o_d < total)
    w_3, w_2, w_1, w_0 = four(w + offset * 4 + o_d * 4, 0, 0, 4, 1, m_d, 1)
    _, x_0, x_1, x_2 = four(x + offset + o_d, row, t_0 + TOKENS + 4, T, stride, m_d, -1) # of t, t - 1 and t - 2
    x_0, x_1, x_2 = x_0.to(tl.float32), x_1.to(tl.float32), x_2.to(tl.float32)
    _, id_0, id_1, id_2 = t_0, t_0, t_0, t_0 # without segments they are not looked at
    if seg is not None:
        _, id_0, id_1, id_2 = four(seg, row, t_0 + TOKENS + 4, T, 1, True, -1)
    id_next = id_0
    dp_1, dp_2, dp_3 = tl.zeros([R, D], tl.float32), tl.zeros([R, D], tl.float32), tl.zeros([R, D], tl.float32)
    dw_0, dw_1, dw_2, dw_3 = dp_1, dp_1, dp_1, dp_1
    for i in range(TOKENS, -1, -4): # the group of tokens i + 3 to i
        xs = four(x + offset + o_d, row, t_0 + i, T, stride, m_d, -1)
        dzs = four(dz + o_d, row, t_0 + i + 3, T, total, m_d, -1)
        if seg is not None:
            ids = four(seg, row, t_0 + i, T, 1, True, -1)
        for j in tl.static_range(4):
            t = t_0 + i + 3 - j
            x_3, b_dy = xs[j].to(tl.float32), dzs[j].to(tl.float32)
            y_1, y_2, y_3 = x_1, x_2, x_3 # what token t sees of them
            if seg is not None:
                id_3 = ids[j]
                y_1 = x_1 * tl.where(id_1 == id_0, 1.0, 0.0)
                y_2 = x_2 * tl.where(id_2 == id_0, 1.0, 0.0)
                y_3 = x_3 * tl.where(id_3 == id_0, 1.0, 0.0)
                same = tl.where(id_next == id_0, 1.0, 0.0)
                dp_1, dp_2, dp_3 = dp_1 * same, dp_2 * same, dp_3 * same
                id_next, id_0, id_1, id_2 = id_0, id_1, id_2, id_3
            b_p = w_0 * x_0 + w_1 * y_1 + w_2 * y_2 + w_3 * y_3
            b_s = tl.sigmoid(b_p)
            if UNIT:
                b_y = b_p * b_s
                b_r = tl.rsqrt(tl.sum(b_y * b_y, 1, keep_dims=True) + 1e-6)
                b_dy = b_r * b_dy - b_r * b_r * b_r * tl.sum(b_dy * b_y, 1, keep_dims=True) * b_y
            dp_0 = b_s * (1 + b_p * (1 - b_s)) * b_dy
            b_dx = w_0 * dp_0 + w_1 * dp_1 + w_2 * dp_2 + w_3 * dp_3
            own = i < TOKENS # not the four tokens of the next stretch
            tl.store(dx + (row + t) * stride + offset + o_d, b_dx.to(dx.dtype.element_ty), mask=m_d & own & (t < T))
            b_dp = tl.where(own, dp_0, 0.0)
            dw_0, dw_1, dw_2, dw_3 = dw_0 + b_dp * x_0, dw_1 + b_dp * y_1, dw_2 + b_dp * y_2, dw_3 + b_dp * y_3
            dp_1, dp_2, dp_3 = dp_0, dp_1, dp_2
            x_0, x_1, x_2 = x_1, x_2, x_3
    dw += (tl.program_id(0).to(tl.int64) * stride + offset + o_d) * 4
    tl.store(dw + 3, tl.sum(dw_0, 0, keep_dims=True), mask=m_d)
    tl.store(dw + 2, tl.sum(dw_1, 0, keep_dims=True), mask=m_d)
    tl.store(dw + 1, tl.sum(dw_2, 0, keep_dims=True), mask=m_d)
    tl.store(dw, tl.sum(dw_3, 0, keep_dims=True), mask=m_d)

def conv_tokens(T):
    return max(4, min(CONV_TOKENS, triton.next_power_of_2(T))) # a decoding step does not walk over 64

def conv_launches(H, K, V, unit):
    """Column offset, columns and UNIT of q, k and v in x, and how many channels a program takes: a head or 128."""
    for offset, total, is_unit in ((0, H * K, unit), (H * K, H * K, unit), (2 * H * K, H * V, False)):
        width = K if is_unit else min(128, total)
        yield offset, total, dict(UNIT=is_unit, WIDTH=width, D=triton.next_power_of_2(width)), triton.cdiv(total, width)

@torch.library.custom_op("kernels::short_conv", mutates_args=())
def short_conv_op(x: Tensor, weight: Tensor, segment_ids: Optional[Tensor], H: int, K: int, V: int,
                  unit: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, T, stride = x.shape
    tokens = conv_tokens(T)
    out = tuple(x.new_empty(B, T, H, D) for D in (K, K, V))
    blocks = B * triton.cdiv(T, tokens)
    with torch.cuda.device_of(x):
        for z, (offset, total, meta, programs) in zip(out, conv_launches(H, K, V, unit)):
            conv_fwd_kernel[(triton.cdiv(blocks, CONV_ROWS), programs)](
                x, weight, segment_ids, z, blocks, T, stride, offset, total, **meta, R=CONV_ROWS, TOKENS=tokens,
                num_warps=4)
    return out

@torch.library.custom_op("kernels::short_conv_backward", mutates_args=())
def short_conv_backward_op(x: Tensor, weight: Tensor, segment_ids: Optional[Tensor], dq: Tensor, dk: Tensor, dv: Tensor,
                           H: int, K: int, V: int, unit: bool) -> tuple[Tensor, Tensor]:
    B, T, stride = x.shape
    tokens = conv_tokens(T)
    blocks = B * triton.cdiv(T, tokens)
    dx = torch.empty_like(x)
    dw = torch.empty(triton.cdiv(blocks, CONV_ROWS), *weight.shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        for dz, (offset, total, meta, programs) in zip((dq, dk, dv), conv_launches(H, K, V, unit)):
            conv_bwd_kernel[(dw.shape[0], programs)](
                x, weight, segment_ids, dz, dx, dw, blocks, T, stride, offset, total, **meta, R=CONV_ROWS,
                TOKENS=tokens, num_warps=4)
    return dx, dw.sum(0)

@short_conv_op.register_fake
def _(x, weight, segment_ids, H, K, V, unit):
    return tuple(x.new_empty(*x.shape[:2], H, D) for D in (K, K, V))

@short_conv_backward_op.register_fake
def _(x, weight, segment_ids, dq, dk, dv, H, K, V, unit):
    return torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32)

def short_conv_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.shape = inputs[3:]

def short_conv_grad(ctx, *dz):
    x, weight, segment_ids = ctx.saved_tensors
    dx, dw = short_conv_backward_op(x, weight, segment_ids, *(d.contiguous() for d in dz), *ctx.shape)
    return dx, dw, None, None, None, None, None

short_conv_op.register_autograd(short_conv_grad, setup_context=short_conv_setup)

def short_conv(x, weight, H, K, V, unit, segment_ids=None):
    """
    q, k (B, T, H, K) and v (B, T, H, V) out of x (B, T, H (K + K + V)) by a causal depthwise convolution over up to
    four tokens of a segment, then SiLU; with `unit`, q and k are scaled to unit length. weight (H (K + K + V), 1 to 4)
    fp32, its last column the current token's; segment_ids (B, T) int32. x bf16 or fp32, computed in fp32.
    """
    assert weight.shape[1] <= TAPS, f"conv_size must be at most {TAPS} on a GPU, got {weight.shape[1]}"
    weight = F.pad(weight.float(), (TAPS - weight.shape[1], 0)).contiguous() # taps of weight zero, as far back as four
    return short_conv_op(x.contiguous(), weight, segment_ids, H, K, V, unit)

# ----------------------------------------------------------------------------------------------------------------------
# the output head: linear + cross-entropy
#
# With the logits z = W x of a token and p = softmax(z),
#   loss = log sum_c e^{z_c} - z_target,   dloss/dz = p - onehot(target).                                      (1)
# One chunk of tokens has its logits in memory at a time; they become dz = (p - onehot) / N in place (N tokens), and
#   dx = dz W,   dW = dz^T x, summed over the chunks in fp32                                                   (2)
# follow at once: gradients are made in the forward pass, where the logits are, and backward scales them by its own.

CE_ROWS = 8192 # tokens a chunk: 824 MB of bf16 logits at 50,304 columns; 65,536 tokens take 35 ms on an H200

@triton.jit
def cross_entropy_kernel(logits, targets, losses, weight, n_cols, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """Eq. (1) of one token: its loss and, with GRAD, weight (p - onehot) in place of its logits. Grid (tokens,)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * n_cols
    target = tl.load(targets + row)
    counts = target >= 0
    z_target = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    o_c = tl.arange(0, BLOCK)
    b_max = tl.full([BLOCK], -1e30, tl.float32) # each lane's running maximum of z log2(e)
    b_sum = tl.zeros([BLOCK], tl.float32) # and sum of 2^(z log2(e) - maximum)
    for c in range(0, n_cols, BLOCK):
        b_z = tl.load(logits + c + o_c, mask=c + o_c < n_cols, other=-float("inf")).to(tl.float32) * LOG2E
        b_new = tl.maximum(b_max, b_z)
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.exp2(b_z - b_new)
        b_max = b_new
    z_max = tl.max(b_max, 0)
    log2_sum = z_max + tl.log2(tl.sum(b_sum * tl.exp2(b_max - z_max), 0))
    tl.store(losses + row, tl.where(counts, log2_sum / LOG2E - z_target, 0.0))
    if GRAD:
        share = tl.where(counts, tl.load(weight), 0.0) # of this token in the mean
        for c in range(0, n_cols, BLOCK):
            b_z = tl.load(logits + c + o_c, mask=c + o_c < n_cols, other=-float("inf")).to(tl.float32) * LOG2E
            b_dz = (tl.exp2(b_z - log2_sum) - tl.where(c + o_c == target, 1.0, 0.0)) * share
            tl.store(logits + c + o_c, b_dz.to(logits.dtype.element_ty), mask=c + o_c < n_cols)

@torch.library.custom_op("kernels::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(x: Tensor, weight: Tensor, targets: Tensor, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, C), weight (vocab, C), targets (N,) -> mean loss, dx like x and dW in fp32 (both empty without grad)."""
    N, vocab = x.shape[0], weight.shape[0]
    W = weight.to(x.dtype)
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    share = 1 / (targets >= 0).sum(dtype=torch.float32)
    dx = torch.empty_like(x) if grad else x.new_empty(0)
    dW = torch.zeros_like(weight, dtype=torch.float32) if grad else x.new_empty(0, dtype=torch.float32)
    with torch.cuda.device_of(x):
        for n in range(0, N, CE_ROWS):
            rows = slice(n, min(n + CE_ROWS, N))
            logits = x[rows] @ W.T
            cross_entropy_kernel[(logits.shape[0],)](logits, targets[rows], losses[rows], share, vocab, GRAD=grad,
                                                     BLOCK=4096, num_warps=16)
            if grad:
                torch.mm(logits, W, out=dx[rows])
                if x.dtype == torch.float32:
                    dW.addmm_(logits.T, x[rows])
                else:
                    torch.addmm(dW, logits.T, x[rows], out_dtype=torch.float32, out=dW)
    return losses.sum() * share, dx, dW

@linear_cross_entropy_op.register_fake
def _(x, weight, targets, grad):
    return (x.new_empty((), dtype=torch.float32), torch.empty_like(x) if grad else x.new_empty(0),
            torch.empty_like(weight, dtype=torch.float32) if grad else x.new_empty(0, dtype=torch.float32))

def linear_cross_entropy_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[1].dtype

def linear_cross_entropy_backward(ctx, dloss, *_):
    dx, dW = ctx.saved_tensors
    return (dx * dloss).to(dx.dtype), (dW * dloss).to(ctx.dtype), None, None

linear_cross_entropy_op.register_autograd(linear_cross_entropy_backward, setup_context=linear_cross_entropy_setup)

def linear_cross_entropy(x, weight, targets):
    """
    Mean over all tokens of the cross-entropy between softmax(x weight^T) and targets, without the logits in memory.
    x (..., C) bf16 or fp32, weight (vocab, C), targets (...) int64 below vocab; -100 leaves a token out of the mean.
    The softmax and the sum that makes weight's gradient are in fp32.
    """
    return linear_cross_entropy_op(x.flatten(0, -2), weight, targets.flatten(), torch.is_grad_enabled())[0]
