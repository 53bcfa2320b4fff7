"""
Fused Triton kernels for Gated Linear Attention, the gated delta rule (forward, backward and one-token step), the short
convolution in front of them and the output head's loss.

    gla(q, k, v, g, scale=None, initial_state=None, segment_ids=None, logits=False)      -> o, final_state
    gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, segment_ids=None) -> o, final_state
    gla_step(q, k, v, g, state, scale=None)                                              -> o, state in place
    gated_delta_rule_step(q, k, v, g, beta, state, scale=None)                           -> o, state in place
    short_conv(x, weight, H, K, V, unit, segment_ids=None)                               -> q, k, v
    linear_cross_entropy(x, weight, targets)                                             -> mean loss
    linear_step, step_inputs, rms_norm: what LM.step and a prompt need besides

B batch, T time, H heads, K key dim per head, V value dim per head; q, k (B, T, H, K), v and o (B, T, H, V).
Tiles: BT tokens a chunk, BV values a program, NT chunks. model.py's chunked forms are the definition of both operators.
TRITON_INTERPRET=1 runs the same kernels on CPU tensors, in fp32.
"""
import functools
import os
from typing import Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1") # a b + c is one instruction; from Triton 3.10 on if asked for
LOG2E = tl.constexpr(1.4426950408889634) # kernels use exp2 only: log gates are multiplied by log2(e) where first summed
BT = 64 # tokens a chunk
SIZES = (64, 128, 256) # widths of K and V that the kernels are built for: narrower ones aren't worth settings
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED_FOR_A_GPU = tl.constexpr(not INTERPRET) # for kernels

# ----------------------------------------------------------------------------------------------------------------------
# shared: the front door, tiles for TMA, launching, what a GPU has

def check(q, k, v, gates, state, segment_ids=None):
    """Refuse what cannot run, each in one sentence. `gates` are (name, tensor, shape, dtypes)."""
    assert q.is_cuda or INTERPRET, "q is on the CPU: the kernels need an NVIDIA GPU, use model.py's chunked form there"
    assert q.dtype in (torch.bfloat16, torch.float32), f"q must be bfloat16 or float32, got {q.dtype}"
    assert k.shape == q.shape and v.shape[:-1] == q.shape[:-1], \
        f"q and k must have one shape and v the same but the last, got {[tuple(x.shape) for x in (q, k, v)]}"
    assert 1 <= q.shape[-1] <= 256 and 1 <= v.shape[-1] <= 256, \
        f"K and V must be 1 to 256, got K={q.shape[-1]} and V={v.shape[-1]}"
    assert q.numel() > 0, f"q is empty, its shape is {tuple(q.shape)}"
    check_each(("k", k, q.shape, (q.dtype,)), ("v", v, v.shape, (q.dtype,)), *gates,
               ("state", state, (q.shape[0], q.shape[-2], q.shape[-1], v.shape[-1]), (torch.float32,)),
               ("segment_ids", segment_ids, q.shape[:2], (torch.int32,)), device=q.device)

def check_each(*named, device):
    """Of each (name, tensor or None, shape, dtypes)."""
    for name, x, shape, dtypes in named:
        if x is not None:
            assert x.shape == torch.Size(shape), f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}"
            assert x.dtype in dtypes, f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}"
            assert x.device == device, f"{name} is on {x.device}, the others on {device}"

def cdiv(a, b):
    return -(-a // b) # triton.cdiv, which kernels can call too, takes 5 us

def widen(x):
    """The last dimension zero-padded to the next of SIZES (exact: added keys and values are zero)."""
    D = x.shape[-1]
    if D not in SIZES: # padding by 0 would copy
        x = F.pad(x, (0, next(s for s in SIZES if s >= D) - D))
    return x.contiguous()

def evenly(x):
    """x (B, T, H, D) where its tokens lie evenly apart, be they columns of a wider product's output; else a copy."""
    B, T, H, D = x.shape
    stride = x.stride(1) # tokens that overlap are copied: their gradient would be laid out otherwise
    even = x.stride() == (T * stride, stride, D, 1) and stride >= H * D and stride * x.element_size() % 16 == 0
    return x if even and D in SIZES else widen(x)

def exact_if_narrow(*tensors):
    """In fp32 where heads are narrower than 32: sums of so few terms would show every rounding to bf16."""
    return [x.float() for x in tensors] if min(x.shape[-1] for x in tensors) < 32 else tensors

def token_stride(x):
    """From token to token of x (B, T, H, D), evenly apart: the stride of a dimension of size 1 may be any number."""
    B, T, H, D = x.shape
    return x.stride(1) if T > 1 else x.stride(0) if B > 1 else H * D

class Tiles(TensorDescriptor):
    def __post_init__(self): # leaves out the checks, 2 us on the host for each descriptor
        pass

def tiles(x, rows, cols):
    """
    Descriptor of `rows` x `cols` tiles of x (B, T, H, D), indexed [b, t, h * D + d]; the bound cuts a ragged T. Without
    TMA it is x itself, see `tiled`.
    """
    B, T, H, D = x.shape
    if x.data_ptr() % 16: # an input that begins inside of another tensor; TMA wants 16 bytes
        x = x.clone()
    if not has_tma(x.device):
        return x.contiguous()
    stride = token_stride(x)
    return Tiles(x, [B, T, H * D], [T * stride, stride, 1], [1, rows, cols])

COMPILED = {} # kernels by all that decides their code: options, constants, the types and alignments of tensors

def launch(kernel, grid, options, *args):
    """kernel[grid](*args, **options), grid (x, y), without Triton's 15 us search for the compiled kernel."""
    if INTERPRET:
        return kernel[grid](*args, **options)
    key = (id(kernel), torch.cuda.current_device(), *options.values(), *[
        x if type(x) in (int, bool, float, type(None)) else
        (x.base.dtype, *x.block_shape) if type(x) is Tiles else (x.dtype, x.data_ptr() % 16)
        for param, x in zip(kernel.params, args) if not param.do_not_specialize])
    if key in COMPILED:
        COMPILED[key][(*grid, 1)](*args)
    else:
        COMPILED[key] = kernel[grid](*args, **options)

@functools.cache
def has_tma(device):
    """Whether a GPU copies tiles by itself, and starts a kernel while the one before ends: from Hopper on."""
    return INTERPRET or torch.cuda.get_device_capability(device) >= (9, 0)

def shared_memory(device):
    """Bytes of shared memory that a block can have: 227 KB on Hopper, 163 on an A100, 99 on cards for desks."""
    return 227 * 1024 if INTERPRET else torch.cuda.get_device_properties(device).shared_memory_per_block_optin

@functools.cache
def small(device):
    return shared_memory(device) < 227 * 1024

@functools.cache
def multiprocessors(device):
    return 1 if INTERPRET else torch.cuda.get_device_properties(device).multi_processor_count

def step_values(n, device):
    """
    Values a program of a step's n: 32, whose states are 16 KB to ask for at once, but 8 where these would leave
    multiprocessors with less than two programs, as a single sequence does.
    """
    return 32 if n >= 64 * multiprocessors(device) else 8

@triton.jit
def after_the_last_kernel():
    """
    From Hopper on the kernels of a step are launched with launch_pdl: one starts while the last one ends, waits here
    for all that was launched before, and lets the next one start. That saves 0.6 us of each in a graph.
    """
    if COMPILED_FOR_A_GPU and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

@triton.jit
def tiled(x, T, W: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr):
    """What `tiles` gave for x (B, T, W) as a descriptor, in a kernel. One made here becomes plain loads on Ampere, 16
    bytes wide since the last stride is known to be 1; the host's would become loads of one value each."""
    if isinstance(x, tl.tensor):
        x = tl.make_tensor_descriptor(x, [2**31 - 1, T, W], [tl.cast(T, tl.int64) * W, W, 1], [1, rows, cols])
    return x

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
# and stays in range while |E| <= REACH. In a chunk where g of half the rows sums to more ("strong", decided on the
# device) each pair j < i belongs to the level of its first differing bit: at the level of blocks of 2w rows, i lies in
# the late half, j in the early half, and r is the last early row. Then G_i - G_r and G_r - G_j are sums of g, <= 0 for
# gates of any strength:
#   X = e^{G - G_r} in late rows, e^{G_r - G} in early ones;   Z = X q in late rows, X k in early ones              (11)
#   P_ij = scale (Z Z^T)_ij,   X dP Z the intra part of dq in late rows,   X dP^T Z that of dk in early ones        (12)
# Documents. Where segment ids differ, P_ij = 0; rows outside the entering state's segment have qe = 0, those outside
# the leaving state's ke = 0; and e^{G_last} = 0 unless the two are one. Sums of g are products with constant matrices,
#   L_ij = 1 for j < i of one segment,   M_ij = L_ij + [i = j] - [j <= m, both i and j of the segment of m],
#   E = M g,   R g = (enter, leave, G_last, sum to row m, sum from there on),   G = enter + E,   G_last - G = leave - E,
# so none crosses a boundary: E is taken from row m in the segment of m, from the segment's start in the others, which
# are 32 rows at most, and one document's inputs do not touch another's outputs by a bit. Without segments all chunks
# share one L, M and R, and the compiler drops every mask.
#
#   name       symbol                    shape                   dtype    written by     read by
#   LMR        L, M, R                   (B, NT, 2 BT + 16, BT)  as q     matrices       prep, strong, dP, grad
#   qe, ke     qe, ke                    (B, T, H, K)            as q     prep, strong   sweep
#   P          P                         (B, T, H, BT)           as q     prep, strong   sweep
#   gates      enter, leave, e^{G_last}  (B H, NT, 3, K)         fp32     prep           strong, sweep, grad
#   strong     0 or 1                    (B H, NT)               int32    prep           strong, grad
#   h, dh      S^T, dS'^T                (B H, NT V, K)          as q     sweep          grad
#   dP         scale dP for j < i        (B, T, H, BT)           as q     dP             grad
# E, enter and leave are in units of log 2. All but the last two rows are kept for backward, which computes h again. The
# state is held transposed, (V, K): it is then the first operand of each of its products and never leaves registers.
# Per token and head, forward and backward: 16 K V + BT (16 K + 6 V) FLOPs, 16 K + 9 V + 5 BT + 4 K V / BT values moved.

REACH = tl.constexpr(92.0) # 2^92 is 5e27: times any q or k it fits bf16
LEAST = tl.constexpr(-104.0) # e^-104 is 0 in fp32
GATE_NORMALIZER = tl.constexpr(16.0) # of logits x, log decay is logsigmoid(x) / 16: model.py's

@triton.jit
def gla_segments(segment_ids, i_b, i_t, T, BT: tl.constexpr):
    """Of chunk i_t: the segment of each row (BT,), of the entering state, of row m and of the leaving state."""
    t, end, zero = i_t * BT, T - 1, i_t * 0
    seg, first, mid, last = tl.zeros([BT], dtype=tl.int32), zero, zero, zero # constants: no test of them is compiled
    if segment_ids is not None:
        ids = segment_ids + i_b.to(tl.int64) * T
        seg, first = tl.load(ids + tl.minimum(t + tl.arange(0, BT), end)), tl.load(ids + tl.maximum(t - 1, 0))
        mid, last = tl.load(ids + tl.minimum(t + BT // 2 - 1, end)), tl.load(ids + tl.minimum(t + BT - 1, end))
    return seg, first, mid, last

@triton.jit
def gla_matsum(M, x, DT: tl.constexpr):
    """M x for M (*, BT) of -1, 0 and 1 in DT; where fp32 x meets bf16 M, as high + low parts: to 2^-17 of x."""
    # (*, BT) x (BT, *)
    if x.dtype == DT:
        s = tl.dot(M, x, input_precision="tf32x3")
    else:
        high = x.to(DT)
        s = tl.dot(M, high, input_precision="tf32x3")
        s = tl.dot(M, (x - high.to(tl.float32)).to(DT), s, input_precision="tf32x3")
    return s

@triton.jit
def gla_rows(x, stride, i_b, i_t, column, T, BT: tl.constexpr, BK: tl.constexpr):
    """Pointers to a chunk's rows of x (B, T, .) from a column on, (BT, BK); stride: from token to token."""
    x += (i_b.to(tl.int64) * T + i_t * BT) * stride + column
    return x + tl.arange(0, BT)[:, None] * stride + tl.arange(0, BK)[None, :]

@triton.jit
def gla_gate(rows, live, LOGITS: tl.constexpr):
    """
    g at these pointers, in fp32 if it is made of LOGITS x, g = logsigmoid(x) / 16; 0 where there is no row. At least
    LEAST, whose decay is 0 in fp32 already: what is stronger would only cost the sums of g their digits.
    """
    g = tl.load(rows, mask=live, other=float("inf") if LOGITS else 0.0)
    if LOGITS:
        x = g.to(tl.float32) * LOG2E
        g = (tl.minimum(x, 0.0) - tl.log2(1.0 + tl.exp2(-tl.abs(x)))) * (1 / (GATE_NORMALIZER * LOG2E))
    g_32 = g.to(tl.float32)
    return tl.where(g_32 < LEAST, LEAST, g_32).to(g.dtype) # NaN stays

@triton.jit
def gla_matrix(LMR, segment_ids, i_b, i_t, row, n: tl.constexpr, BT: tl.constexpr):
    """Rows row + [0, n) of a chunk's LMR: (n, BT). Without segments all chunks share one."""
    if segment_ids is not None:
        LMR += (i_b.to(tl.int64) * tl.num_programs(1) + i_t) * ((2 * BT + 16) * BT)
    return tl.load(LMR + (row + tl.arange(0, n)[:, None]) * BT + tl.arange(0, BT)[None, :])

@triton.jit(do_not_specialize=["T"])
def gla_matrices_kernel(segment_ids, LMR, T, BT: tl.constexpr):
    """L, M and R of (10) for each chunk. Grid (B, NT), or (1, 1) without segments."""
    i_b, i_t = tl.program_id(0), tl.program_id(1)
    i, r, j = tl.arange(0, BT)[:, None], tl.arange(0, 16)[:, None], tl.arange(0, BT)[None, :]
    seg, first, mid, last = gla_segments(segment_ids, i_b, i_t, T, BT)
    row, col = seg[:, None], seg[None, :]
    LMR += (i_b.to(tl.int64) * tl.num_programs(1) + i_t) * ((2 * BT + 16) * BT)
    L = (j < i) & (row == col)
    tl.store(LMR + i * BT + j, tl.where(L, 1.0, 0.0))
    early = j < BT // 2 # columns up to m
    M = tl.where(L | (i == j), 1.0, 0.0) - tl.where((row == mid) & (col == mid) & early, 1.0, 0.0)
    tl.store(LMR + (BT + i) * BT + j, M)
    enter, leave = early & (col == mid) & (first == mid), (col == last) & ~(early & (last == mid))
    R = (r == 0) & enter | (r == 1) & leave | (r == 2) | (r == 3) & early | (r == 4) & ~early
    tl.store(LMR + (2 * BT + r) * BT + j, tl.where(R, 1.0, 0.0))

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
    X = tl.exp2(gla_matsum(tl.where(M, 1.0, 0.0).to(DT), b_g, DT) * LOG2E) # <= 1
    Z = (tl.where(late[:, None], b_q, b_k).to(tl.float32) * X).to(DT)
    pair = late[:, None] & ~late[None, :] & (r[:, None] == r[None, :]) & (seg[:, None] == seg[None, :])
    return X, Z, late, pair

@triton.jit(do_not_specialize=["T", "scale"])
def gla_prep_kernel(q, k, g, segment_ids, LMR, qe, ke, P, gates, strong, scale, T, s_q, s_k, H: tl.constexpr,
                    K: tl.constexpr, BT: tl.constexpr, LOGITS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """Eq. (2) of a chunk by (10), and whether it is strong, thus to be done again. Grid (B H, NT)."""
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_c = i_bh.to(tl.int64) * tl.num_programs(1) + i_t # of a (B H, NT, *) tensor
    DT: tl.constexpr = q.dtype.element_ty
    o, r = tl.arange(0, BT), tl.arange(0, 16)[:, None]
    live = (i_t * BT + o < T)[:, None]
    seg, first, mid, last = gla_segments(segment_ids, i_b, i_t, T, BT)
    M, R = gla_matrix(LMR, segment_ids, i_b, i_t, BT, BT, BT), gla_matrix(LMR, segment_ids, i_b, i_t, 2 * BT, 16, BT)
    b_P = tl.zeros([BT, BT], dtype=tl.float32)
    least = tl.zeros([16, BK], dtype=tl.float32)
    for i_k in tl.range(0, K, BK, num_stages=STAGES):
        b_q = tl.load(gla_rows(q, s_q, i_b, i_t, i_h * K + i_k, T, BT, BK), mask=live, other=0.0)
        b_k = tl.load(gla_rows(k, s_k, i_b, i_t, i_h * K + i_k, T, BT, BK), mask=live, other=0.0)
        b_g = gla_gate(gla_rows(g, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), live, LOGITS)
        # (16, BT) x (BT, BK)
        sums = gla_matsum(R, b_g, DT) * LOG2E
        least = tl.minimum(least, sums)
        b_enter, b_leave = tl.sum(tl.where(r == 0, sums, 0.0), 0), tl.sum(tl.where(r == 1, sums, 0.0), 0)
        decay = tl.where(first == last, tl.exp2(sums), 0.0)
        o_c = (i_c * 3 * K + i_k) + r * K + tl.arange(0, BK)[None, :]
        tl.store(gates + o_c, tl.where(r == 2, decay, sums), mask=r < 3)
        # (BT, BT) x (BT, BK)
        E = gla_matsum(M, b_g, DT) * LOG2E
        qx = b_q * tl.exp2(E) # q e^E, and below k e^{-E}: infinite in some strong chunks
        b_qe = tl.where((seg == first)[:, None], qx * (scale * tl.exp2(b_enter))[None, :], 0.0)
        tl.store(gla_rows(qe, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), b_qe.to(DT), mask=live)
        kx = b_k * tl.exp2(-E)
        b_ke = tl.where((seg == last)[:, None], kx * tl.exp2(b_leave)[None, :], 0.0)
        tl.store(gla_rows(ke, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), b_ke.to(DT), mask=live)
        # (10): (BT, BK) x (BK, BT); above the diagonal it may overflow
        b_P = tl.dot(qx.to(DT), tl.trans(kx.to(DT)), b_P, input_precision="tf32x3")
    lower = (gla_matrix(LMR, segment_ids, i_b, i_t, 0, BT, BT) > 0) | (o[:, None] == o[None, :])
    b_P = tl.where(lower, b_P * scale, 0.0)
    tl.store(gla_rows(P, H * BT, i_b, i_t, i_h * BT, T, BT, BT), b_P.to(DT), mask=live)
    least = tl.where(r >= 3, least, 0.0) # the sums of the halves
    tl.store(strong + i_c, (tl.min(tl.min(least, 0), 0) < -REACH).to(tl.int32))

@triton.jit(do_not_specialize=["T", "scale"])
def gla_strong_kernel(q, k, g, segment_ids, LMR, qe, ke, P, gates, strong, scale, T, s_q, s_k, H: tl.constexpr,
                      K: tl.constexpr, BT: tl.constexpr, LOGITS: tl.constexpr, BK: tl.constexpr):
    """Eq. (2) of a strong chunk, P by (12). Grid (B H, NT); returns at once where the chunk is not strong."""
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_c = i_bh.to(tl.int64) * tl.num_programs(1) + i_t
    if tl.load(strong + i_c) == 0:
        return
    DT: tl.constexpr = q.dtype.element_ty
    o = tl.arange(0, BT)
    live = (i_t * BT + o < T)[:, None]
    seg, first, mid, last = gla_segments(segment_ids, i_b, i_t, T, BT)
    M = gla_matrix(LMR, segment_ids, i_b, i_t, BT, BT, BT)
    b_P = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        b_q = tl.load(gla_rows(q, s_q, i_b, i_t, i_h * K + i_k, T, BT, BK), mask=live, other=0.0)
        b_k = tl.load(gla_rows(k, s_k, i_b, i_t, i_h * K + i_k, T, BT, BK), mask=live, other=0.0)
        b_g = gla_gate(gla_rows(g, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), live, LOGITS)
        o_c = i_c * 3 * K + i_k + tl.arange(0, BK)
        b_enter, b_leave = tl.load(gates + o_c), tl.load(gates + o_c + K)
        E = gla_matsum(M, b_g, DT) * LOG2E
        b_qe = tl.where((seg == first)[:, None], b_q * tl.exp2(E + b_enter[None, :]) * scale, 0.0)
        tl.store(gla_rows(qe, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), b_qe.to(DT), mask=live)
        b_ke = tl.where((seg == last)[:, None], b_k * tl.exp2(b_leave[None, :] - E), 0.0)
        tl.store(gla_rows(ke, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), b_ke.to(DT), mask=live)
        diagonal = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
        b_P += tl.where(o[:, None] == o[None, :], diagonal[:, None], 0.0)
        for level in range(6): # BT = 2^6
            X, Z, late, pair = gla_level(level, b_q, b_k, b_g, seg, DT, BT)
            # Z Z^T: (BT, BK) x (BK, BT)
            b_P += tl.where(pair, tl.dot(Z, tl.trans(Z), input_precision="tf32x3"), 0.0)
    tl.store(gla_rows(P, H * BT, i_b, i_t, i_h * BT, T, BT, BT), (b_P * scale).to(DT), mask=live)

@triton.jit(do_not_specialize=["T", "n"])
def gla_sweep_kernel(x, a, c, P, y, h, S0, SN, gates, part, part_decay, T, n, H: tl.constexpr, K: tl.constexpr,
                     V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
                     OUT: tl.constexpr, STATES: tl.constexpr, LOCAL: tl.constexpr):
    """
    The state through the chunks, S <- decay S + a^T x: (4) with a = ke, x = v, or REVERSE (5) with a = qe, x = do.
    OUT writes y = c S + P x with c = qe, (3), or y = c S + P^T x with c = ke, (6); STATES writes S as each chunk meets
    it. Grid (B H V/BV, parts of n chunks): LOCAL leaves each part's S from zero, and its decay, in `part` and
    part_decay; the full pass then starts each part from what those before it leave.
    """
    i_bh, i_v, i_s = tl.program_id(0) // (V // BV), tl.program_id(0) % (V // BV) * BV, tl.program_id(1)
    i_b, i_h, NT = i_bh // H, i_bh % H, tl.cdiv(T, BT)
    BH = tl.num_programs(0).to(tl.int64) // (V // BV)
    o_k = tl.arange(0, K)
    tile = (i_v + tl.arange(0, BV))[:, None] * K + o_k[None, :] # of a (V, K) state
    x, a = tiled(x, T, H * V, BT, BV), tiled(a, T, H * K, BT, K)
    if OUT:
        c, P, y = tiled(c, T, H * K, BT, K), tiled(P, T, H * BT, BT, BT), tiled(y, T, H * V, BT, BV)
    if STATES:
        h = tiled(h, NT * V, K, BV, K)
    S = tl.zeros([BV, K], dtype=tl.float32)
    if not LOCAL:
        if S0 is not None:
            S = tl.load(S0 + i_bh.to(tl.int64) * V * K + tile)
        if part is not None:
            for i in range(i_s):
                S *= tl.load(part_decay + (i * BH + i_bh) * K + o_k)[None, :]
                S += tl.load(part + (i * BH + i_bh) * V * K + tile)
    total = tl.zeros([K], dtype=tl.float32) + 1.0 # the part's decay

    for j in tl.range(i_s * n, tl.minimum(i_s * n + n, NT), num_stages=STAGES):
        i_t = NT - 1 - j if REVERSE else j
        b_a = a.load([i_b, i_t * BT, i_h * K]).reshape(BT, K)
        b_x = x.load([i_b, i_t * BT, i_h * V + i_v]).reshape(BT, BV)
        b_decay = tl.load(gates + ((i_bh.to(tl.int64) * NT + i_t) * 3 + 2) * K + o_k)
        if STATES:
            h.store([i_bh, i_t * V + i_v, 0], S.to(b_a.dtype).reshape(1, BV, K))
        if OUT:
            b_c = c.load([i_b, i_t * BT, i_h * K]).reshape(BT, K)
            b_P = P.load([i_b, i_t * BT, i_h * BT]).reshape(BT, BT)
            # (3) transposed: (BV, K) x (K, BT) + (BV, BT) x (BT, BT)
            yT = tl.dot(S.to(b_a.dtype), tl.trans(b_c), input_precision="tf32x3")
            yT = tl.dot(tl.trans(b_x), b_P if REVERSE else tl.trans(b_P), yT, input_precision="tf32x3")
            y.store([i_b, i_t * BT, i_h * V + i_v], tl.trans(yT).to(b_a.dtype).reshape(1, BT, BV))
        # (4) or (5) transposed: (BV, BT) x (BT, K)
        S = tl.dot(tl.trans(b_x), b_a, S * b_decay[None, :], input_precision="tf32x3")
        if LOCAL:
            total *= b_decay
    if LOCAL:
        tl.store(part + (i_s * BH + i_bh) * V * K + tile, S)
        tl.store(part_decay + (i_s * BH + i_bh) * K + o_k, total) # the same from every block of V
    elif i_s == tl.num_programs(1) - 1:
        tl.store(SN + i_bh.to(tl.int64) * V * K + tile, S)

@triton.jit(do_not_specialize=["T", "scale"])
def gla_dP_kernel(v, do, segment_ids, LMR, dP, diagonal, scale, T, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                  BV: tl.constexpr, STAGES: tl.constexpr):
    """scale dP of (6) in a chunk, its diagonal (B, T, H) apart, in fp32. Grid (B H, NT)."""
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_b, i_h, t0 = i_bh // H, i_bh % H, i_t * BT
    v, do = tiled(v, T, H * V, BT, BV), tiled(do, T, H * V, BT, BV)
    b_dP = tl.zeros([BT, BT], dtype=tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_v = v.load([i_b, t0, i_h * V + i_v]).reshape(BT, BV)
        b_do = do.load([i_b, t0, i_h * V + i_v]).reshape(BT, BV)
        # (BT, BV) x (BV, BT)
        b_dP = tl.dot(b_do, tl.trans(b_v), b_dP, input_precision="tf32x3")
    b_dP *= scale
    o = tl.arange(0, BT)
    b_diagonal = tl.sum(tl.where(o[:, None] == o[None, :], b_dP, 0.0), 1)
    tl.store(diagonal + (i_b.to(tl.int64) * T + t0 + o) * H + i_h, b_diagonal, mask=t0 + o < T)
    b_dP = tl.where(gla_matrix(LMR, segment_ids, i_b, i_t, 0, BT, BT) > 0, b_dP, 0.0)
    rows = gla_rows(dP, H * BT, i_b, i_t, i_h * BT, T, BT, BT)
    tl.store(rows, b_dP.to(dP.dtype.element_ty), mask=(t0 + o < T)[:, None])

@triton.jit(do_not_specialize=["T", "scale"])
def gla_grad_kernel(q, k, v, g, segment_ids, do, LMR, dP, diagonal, gates, strong, h, dh, dq, dk, dg, scale, T, s_q,
                    s_k, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                    BV: tl.constexpr, STAGES: tl.constexpr, LOGITS: tl.constexpr, STRONG: tl.constexpr):
    """Eqs. (7) to (9) of a chunk for BK keys, stored where the chunk is as STRONG. Grid (B H K/BK, NT)."""
    i_bh, i_k, i_t = tl.program_id(0) // (K // BK), tl.program_id(0) % (K // BK) * BK, tl.program_id(1)
    i_b, i_h, t0 = i_bh // H, i_bh % H, i_t * BT
    i_c = i_bh.to(tl.int64) * tl.num_programs(1) + i_t
    is_strong = tl.load(strong + i_c)
    if STRONG: # the other pass doesn't wait for the answer: it only stores by it
        if is_strong == 0:
            return
    v, do = tiled(v, T, H * V, BT, BV), tiled(do, T, H * V, BT, BV)
    h, dh = tiled(h, tl.num_programs(1) * V, K, BV, BK), tiled(dh, tl.num_programs(1) * V, K, BV, BK)
    DT: tl.constexpr = v.dtype
    o = tl.arange(0, BT)
    live = (t0 + o < T)[:, None]
    # by pointer: these loads stay in flight through the loop
    b_q = tl.load(gla_rows(q, s_q, i_b, i_t, i_h * K + i_k, T, BT, BK), mask=live, other=0.0)
    b_k = tl.load(gla_rows(k, s_k, i_b, i_t, i_h * K + i_k, T, BT, BK), mask=live, other=0.0)
    b_g = gla_gate(gla_rows(g, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), live, LOGITS)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    SdS = tl.zeros([BK, BK], dtype=tl.float32) # the diagonal is sum_v S dS'
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_v = v.load([i_b, t0, i_h * V + i_v]).reshape(BT, BV)
        b_do = do.load([i_b, t0, i_h * V + i_v]).reshape(BT, BV)
        b_h = h.load([i_bh, i_t * V + i_v, i_k]).reshape(BV, BK)
        b_dh = dh.load([i_bh, i_t * V + i_v, i_k]).reshape(BV, BK)
        # (BK, BV) x (BV, BK): fewer instructions than the diagonal alone, elementwise
        SdS = tl.dot(tl.trans(b_h), b_dh, SdS, input_precision="tf32x3")
        # S do and dS' v: (BT, BV) x (BV, BK)
        b_dq = tl.dot(b_do, b_h, b_dq, input_precision="tf32x3")
        b_dk = tl.dot(b_v, b_dh, b_dk, input_precision="tf32x3")

    seg, first, mid, last = gla_segments(segment_ids, i_b, i_t, T, BT)
    m_first, m_last = (seg == first)[:, None], (seg == last)[:, None]
    b_L, M = gla_matrix(LMR, segment_ids, i_b, i_t, 0, BT, BT), gla_matrix(LMR, segment_ids, i_b, i_t, BT, BT, BT)
    o_k = tl.arange(0, BK)
    o_c = i_c * 3 * K + i_k + o_k
    b_enter, b_leave = tl.load(gates + o_c), tl.load(gates + o_c + K)
    b_y = tl.load(gates + o_c + 2 * K) * tl.sum(tl.where(o_k[:, None] == o_k[None, :], SdS, 0.0), 1)
    b_diagonal = tl.load(diagonal + (i_b.to(tl.int64) * T + t0 + o) * H + i_h, mask=t0 + o < T, other=0.0)[:, None]
    # zero on the diagonal and above
    b_dP = tl.load(gla_rows(dP, H * BT, i_b, i_t, i_h * BT, T, BT, BT), mask=live, other=0.0)
    E = gla_matsum(M, b_g, DT) * LOG2E
    if STRONG:
        b_dq = tl.where(m_first, b_dq * tl.exp2(E + b_enter[None, :]) * scale, 0.0)
        b_dk = tl.where(m_last, b_dk * tl.exp2(b_leave[None, :] - E), 0.0)
        b_a = b_k * b_dk
        both = b_dP + tl.trans(b_dP)
        for level in range(6):
            X, Z, late, pair = gla_level(level, b_q, b_k, b_g, seg, DT, BT)
            # (12): (BT, BT) x (BT, BK)
            XdPZ = X * tl.dot(tl.where(pair | tl.trans(pair), both, 0.0), Z, input_precision="tf32x3")
            b_dq += tl.where(late[:, None], XdPZ, 0.0)
            b_dk += tl.where(late[:, None], 0.0, XdPZ)
    else:
        # (7) and (8) around row m, as (10): (BT, BT) x (BT, BK)
        X, Y = tl.exp2(E), tl.exp2(-E)
        kx = b_k * Y
        b_dq = tl.where(m_first, b_dq * (scale * tl.exp2(b_enter))[None, :], 0.0)
        b_dq = tl.dot(b_dP, kx.to(DT), b_dq, input_precision="tf32x3") * X
        b_dk = tl.where(m_last, b_dk * tl.exp2(b_leave)[None, :], 0.0)
        b_a = kx * b_dk
        b_dk = tl.dot(tl.trans(b_dP), (b_q * X).to(DT), b_dk, input_precision="tf32x3") * Y
        live = (t0 + o < tl.where(is_strong == 0, T, 0))[:, None]
    tl.store(gla_rows(dq, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), (b_dq + b_diagonal * b_k).to(DT), mask=live)
    tl.store(gla_rows(dk, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), (b_dk + b_diagonal * b_q).to(DT), mask=live)
    # (9): (BT, BT) x (BT, BK)
    b_x = b_q * b_dq - (b_k * b_dk - b_a)
    b_dg = gla_matsum(tl.trans(b_L), b_x, DT) + b_x + b_y[None, :]
    b_dg = tl.dot(b_L, b_a.to(DT), b_dg, input_precision="tf32x3")
    if LOGITS: # dg / dx = sigmoid(-x) / 16
        x = tl.load(gla_rows(g, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), mask=live, other=0.0).to(tl.float32)
        b_dg *= 1 / (GATE_NORMALIZER * (1.0 + tl.exp2(x * LOG2E)))
    tl.store(gla_rows(dg, H * K, i_b, i_t, i_h * K + i_k, T, BT, BK), b_dg.to(dg.dtype.element_ty), mask=live)

@triton.jit
def gla_step_kernel(q, k, v, g, state, o, scale, K, V, sb, sh, sk, sv, H: tl.constexpr, BK: tl.constexpr,
                    BV: tl.constexpr):
    """Eq. (1), one token. state (B, H, K, V) with strides sb, sh, sk, sv is updated in place. Grid (B H, V/BV)."""
    i_bh = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    tile = state + i_bh // H * sb + i_bh % H * sh + o_v[:, None] * sv + o_k[None, :] * sk
    mask = m_v[:, None] & m_k[None, :]
    after_the_last_kernel()
    S = tl.load(tile, mask=mask, other=0.0)
    b_q = tl.load(q + i_bh * K + o_k, mask=m_k, other=0.0).to(tl.float32) * scale
    b_k = tl.load(k + i_bh * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_g = tl.load(g + i_bh * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_bh * V + o_v, mask=m_v, other=0.0).to(tl.float32)
    S = S * tl.exp(b_g)[None, :] + b_k[None, :] * b_v[:, None]
    tl.store(tile, S, mask=mask)
    tl.store(o + i_bh * V + o_v, tl.sum(S * b_q[None, :], 1).to(o.dtype.element_ty), mask=m_v)

def gla_launch(q, g, V, logits):
    """
    Tiles, stages and options of prep (BK), the sweep with outputs (BV), that of states alone (BV) and grad (BK, BV); K
    and V are 64, 128 or 256. bf16 with K up to 128 is the fast case and takes up to 217 KB of shared memory; GPUs with
    less of it take 89 KB at most (compiled for sm_80, not run). Against fp64 on an H200: dev/log.md says which, and on
    which build.
    """
    K, bf16, four, eight = q.shape[-1], q.dtype == torch.bfloat16, dict(num_warps=4), dict(num_warps=8)
    if small(q.device):
        return (32, 2, four), (32, 2 if bf16 else 1, four), (32, 2 if bf16 else 1, four), (32, 64, 2, four)
    prep = 32, 3, dict(num_warps=4, maxnreg=128) if bf16 else four # 128 registers: four programs an SM
    if bf16 and g.dtype == torch.bfloat16 and not logits: # 168 registers: three programs an SM; fp32 gates spill
        prep = 64, 2, dict(num_warps=4, maxnreg=168)
    grad = 64, 64, 3 if bf16 else 2, four
    if bf16 and K <= 128:
        return prep, (min(V, 128), 3, eight), (64, 3, four), grad
    if bf16 or K <= 128:
        return prep, (32, 2, eight), (32, 2, four), grad
    return prep, (16, 1, four), (32, 2, four), grad

def gla_parts(programs, NT, device):
    """(parts, chunks in each) of a sweep of NT chunks: enough that programs x parts fill the device."""
    n = cdiv(NT, max(1, min(multiprocessors(device) // programs, NT // 4)))
    return cdiv(NT, n), n

def gla_sweep(x, a, c, P, y, h, S0, gates, settings, reverse):
    """
    The passes of gla_sweep_kernel: fills y and h where given, returns the last state (B, H, V, K), fp32. a and c are
    descriptors of (BT, K) tiles.
    """
    (B, T, H, V), K, (BV, STAGES, options) = x.shape, gates.shape[-1], settings
    BH, NT = B * H, cdiv(T, BT)
    NS, n = gla_parts(BH * (V // BV), NT, x.device)
    x, SN, part, part_decay = tiles(x, BT, BV), gates.new_empty(B, H, V, K), None, None
    constants = H, K, V, BT, BV, STAGES, reverse
    if NS > 1:
        part, part_decay = gates.new_empty(NS - 1, BH, V, K), gates.new_empty(NS - 1, BH, K)
        launch(gla_sweep_kernel, (BH * (V // BV), NS - 1), options, x, a, None, None, None, None, S0, None, gates, part,
               part_decay, T, n, *constants, False, False, True)
    OUT, STATES = y is not None, h is not None
    launch(gla_sweep_kernel, (BH * (V // BV), NS), options, x, a, c, tiles(P, BT, BT) if OUT else None,
           tiles(y, BT, BV) if OUT else None, tiles(h.unsqueeze(2), BV, K) if STATES else None, S0, SN,
           gates, part, part_decay, T, n, *constants, OUT, STATES, False)
    return SN

def gla_buffers(q, segment_ids):
    """For forward to fill, and kept for backward: LMR, qe, ke, P, gates, strong."""
    (B, T, H, K), NT = q.shape, cdiv(q.shape[1], BT)
    chunks = (1, 1) if segment_ids is None else (B, NT)
    return (q.new_empty(*chunks, 2 * BT + 16, BT), torch.empty_like(q), torch.empty_like(q), q.new_empty(B, T, H, BT),
            q.new_empty(B * H, NT, 3, K, dtype=torch.float32), q.new_empty(B * H, NT, dtype=torch.int32))

@torch.library.custom_op("kernels::gla_fwd", mutates_args=())
def gla_fwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, S0: Optional[Tensor],
            segment_ids: Optional[Tensor], logits: bool) \
            -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o and the last state (B, H, V, K); for backward LMR, qe, ke, P, gates and strong."""
    (B, T, H, K), V, NT = q.shape, v.shape[-1], cdiv(q.shape[1], BT)
    o, (LMR, qe, ke, P, gates, strong) = torch.empty_like(v), gla_buffers(q, segment_ids)
    (BK, STAGES, options), out, _, _ = gla_launch(q, g, V, logits)
    s_q, s_k = token_stride(q), token_stride(k)
    io = q, k, g, segment_ids, LMR, qe, ke, P, gates, strong, scale, T, s_q, s_k, H, K, BT, logits
    with torch.cuda.device_of(q):
        launch(gla_matrices_kernel, LMR.shape[:2], dict(num_warps=4), segment_ids, LMR, T, BT)
        launch(gla_prep_kernel, (B * H, NT), options, *io, BK, STAGES)
        launch(gla_strong_kernel, (B * H, NT), dict(num_warps=4, num_stages=1), *io, 64)
        SN = gla_sweep(v, tiles(ke, BT, K), tiles(qe, BT, K), P, o, None, S0, gates, out, reverse=False)
    return o, SN, LMR, qe, ke, P, gates, strong

@gla_fwd.register_fake
def _(q, k, v, g, scale, S0, segment_ids, logits):
    (B, T, H, K), V = q.shape, v.shape[-1]
    return torch.empty_like(v), q.new_empty(B, H, V, K, dtype=torch.float32), *gla_buffers(q, segment_ids)

@torch.library.custom_op("kernels::gla_bwd", mutates_args=())
def gla_bwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, S0: Optional[Tensor],
            segment_ids: Optional[Tensor], logits: bool, LMR: Tensor, qe: Tensor, ke: Tensor, P: Tensor, gates: Tensor,
            strong: Tensor, do: Tensor, dSN: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg and the gradient (B, H, V, K) of the initial state. The states are computed again, not stored."""
    (B, T, H, K), V, NT = q.shape, v.shape[-1], cdiv(q.shape[1], BT)
    dq, dk, dv, dg = map(torch.empty_like, (q, k, v, g))
    h, dh = q.new_empty(B * H, NT * V, K), q.new_empty(B * H, NT * V, K)
    dP, diagonal = torch.empty_like(P), gates.new_empty(B, T, H)
    _, out, states, (BK, BV, STAGES, options) = gla_launch(q, g, V, logits)
    with torch.cuda.device_of(q):
        tqe, tke = tiles(qe, BT, K), tiles(ke, BT, K)
        gla_sweep(v, tke, None, None, None, h, S0, gates, states, reverse=False)
        dS0 = gla_sweep(do, tqe, tke, P, dv, dh, dSN, gates, out, reverse=True)
        tv, tdo = tiles(v, BT, BV), tiles(do, BT, BV)
        th, tdh = (tiles(x.unsqueeze(2), BV, BK) for x in (h, dh))
        launch(gla_dP_kernel, (B * H, NT), dict(num_warps=4), tv, tdo, segment_ids, LMR, dP, diagonal, scale, T,
               H, V, BT, BV, 3)
        for is_strong in (False, True):
            launch(gla_grad_kernel, (B * H * (K // BK), NT), options, q, k, tv, g, segment_ids, tdo, LMR, dP, diagonal,
                   gates, strong, th, tdh, dq, dk, dg, scale, T, token_stride(q), token_stride(k), H, K, V, BT, BK,
                   BV, STAGES, logits, is_strong)
    return dq, dk, dv, dg, dS0

@gla_bwd.register_fake
def _(q, k, v, g, scale, S0, segment_ids, logits, LMR, qe, ke, P, gates, strong, do, dSN):
    return *map(torch.empty_like, (q, k, v, g)), q.new_empty(q.shape[0], q.shape[2], v.shape[-1], q.shape[-1],
                                                             dtype=torch.float32)

def gla_setup(ctx, inputs, output):
    q, k, v, g, scale, S0, segment_ids, logits = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, S0, segment_ids, *output[2:])
    ctx.scale, ctx.logits = scale, logits

def gla_backward(ctx, do, dSN, *_):
    q, k, v, g, S0, segment_ids, *saved = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do.contiguous() # only the final state may feed the loss
    dSN = None if dSN is None else dSN.contiguous()
    dq, dk, dv, dg, dS0 = gla_bwd(q, k, v, g, ctx.scale, S0, segment_ids, ctx.logits, *saved, do, dSN)
    return dq, dk, dv, dg, None, None if S0 is None else dS0, None, None

gla_fwd.register_autograd(gla_backward, setup_context=gla_setup)

def gla(q, k, v, g, scale=None, initial_state=None, segment_ids=None, logits=False):
    """
    Gated Linear Attention (Yang et al. 2023, arXiv:2312.06635), eq. (1) over T tokens: returns o, final_state.

    q, k (B, T, H, K) and v (B, T, H, V), all bf16 or all fp32; g (B, T, H, K), bf16 or fp32: log decay <= 0, or with
    `logits` numbers x of any sign, of which log decay is logsigmoid(x) / 16. scale defaults to K**-0.5. initial_state
    and final_state (B, H, K, V), fp32, both differentiable. segment_ids (B, T) int32, non-decreasing: the state
    restarts at zero where the id changes; initial_state belongs to the first token's segment. K and V from 1 to 256.
    What cannot run raises an AssertionError that says why.
    """
    check(q, k, v, [("g", g, q.shape, (torch.bfloat16, torch.float32))], initial_state, segment_ids)
    B, T, H, K, V, dtype = *q.shape, v.shape[-1], q.dtype
    scale = K**-0.5 if scale is None else float(scale)
    S0 = None
    if initial_state is not None: # held as (V, K)
        S0 = widen(widen(initial_state).transpose(-1, -2))
    if segment_ids is not None:
        segment_ids = segment_ids.contiguous()
    q, k, v = exact_if_narrow(q, k, v)
    q, k, v, g = *map(evenly, (q, k, v)), widen(g)
    o, SN, *_ = gla_fwd(q, k, v, g, scale, S0, segment_ids, logits)
    if (K, V) != (SN.shape[-1], SN.shape[-2]): # the gradient of a slice is a copy
        o, SN = o[..., :V], SN[..., :V, :K]
    return o.to(dtype), SN.transpose(-1, -2)

@torch.library.custom_op("kernels::gla_step", mutates_args={"state"})
def gla_step_op(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    B, H, K, V = state.shape
    o, BV = torch.empty_like(v), step_values(B * H * V, q.device)
    with torch.cuda.device_of(q):
        launch(gla_step_kernel, (B * H, cdiv(V, BV)), dict(num_warps=4, launch_pdl=has_tma(q.device)), q, k, v, g,
               state, o, scale, K, V, *state.stride(), H, 1 << (K - 1).bit_length(), BV)
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
#
# S_t = e^{g_t} S_{t-1} + beta_t k_t u_t^T,  u_t = v_t - e^{g_t} S_{t-1}^T k_t,  o_t = s S_t^T q_t  (1)
# S is (K, V); g <= 0 and beta are one number per token and head, s the scale, k of unit norm.
#
# Split T into chunks of BT. Inside one, G_i = g_1 + ... + g_i, D_ij = beta_j e^{G_i - G_j} for j <= i and 0 above the
# diagonal, e_i = e^{G_i}, r_i = beta_i e^{G_last - G_i}, d = e^{G_last}; S is the state on entry, u the rows u_i. With
#   N = (I + strict_lower(beta_i k_i k_j))^{-1}     without gates, which only scale it by e^{G_i - G_j}  (2)
#   A_ij = D_ij N_ij / beta_i,   X = A^T (r * k),   Y = P A,   P = s D * (q k^T)  (3)
# a chunk is, W being v less what the state on entry already answers to k,
#   W = v - e * (k S),   o = s e * (q S) + Y W,   S' = d S + X^T W,   u = A W  (4)
# and backward, with dS' the gradient of the state that leaves it,
#   dv = Y^T do + X dS',   dS = d dS' + q^T (s e * do) - k^T (e * dv)  (5)
#   dP = s D * (do u^T),   Z = dv u^T,   dkk = -strict_lower(D * Z),   dbeta_i = Z_ii / beta_i  (6)
#   (do, dv) u^T = ((do, dv) W^T) A^T,   u dS'^T = A (W dS'^T)  (7)
#   dq = s e * (do S^T) + dP k  (8)
#   dk = -e * (dv S^T) + r * (u dS'^T) + dP^T q + (dkk + dkk^T) k  (9)
#   a_i = q_i (s e * do S^T)_i - k_i (e * dv S^T)_i + row_i(H) - column_i(H),   H = dP * (q k^T) + dkk * (k k^T)
#   b_j = k_j (r * u dS'^T)_j,     dg_t = sum_{i >= t} a_i + sum_{j < t} b_j + d <S, dS'>  (10)
# (6) follows from u_i = W_i - sum_{j < i} D_ij k_i k_j u_j.
#
# X and Y are made in fp32 and rounded once: where keys are alike, A takes neighbours from each other, and S' or o from
# a rounded A and u would have eight times (the root of BT) the error. For the same reason backward never rounds u: it
# multiplies sums of W over V by an A of two terms. dg is summed inside the chunk only: one sum over the sequence costs
# ten times the error. Backward makes the states again from W: 0.13 ms more than to keep them (H200, B=32 T=2048 H6 K128
# V256), and half of what a layer keeps. beta is taken as max(beta, 1e-14): the function changes by no more than that, u
# and dv keep their relative accuracy, and dbeta is right at 0. A has 1 on the diagonal; left of it beta_j, a decay and
# a product of k_i, k_j and contractions between them, no larger than 1: fp16 holds it to 2^-11. No exponent is positive
# but that of a beta above 1, so nothing overflows. Documents: G is summed inside a segment; D between segments, e
# behind a boundary, r before one and d across one are 0. So no bit of one document's inputs reaches another's outputs.
# A decay below 2^-126 begins a segment, too: gates of any strength, -inf included, cost the sums that follow no digits.
# d is e of the last row.
#
#   symbol   tensor, all contiguous               dtype     made by           kept for backward
#   G, e, r  gates (B, H, NT, GATES, BT)          fp32      gdn_solve         yes, G in log2 units, and the segment
#   A        A (B, H, NT, BT, BT)                 fp16*     gdn_solve         yes      * fp32 with an fp32 q
#   X^T, Y   X (B, H, NT, K, BT), Y (.., BT, BT)  q's       gdn_solve         yes
#   W        W (B, H, NT, BT, V)                  q's       gdn_fwd           yes
#   S^T      h (B, H, NT, V, K), entering state   q's       gdn_states        -
#   dS'^T    dh (B, H, NT, V, K)                  q's       gdn_bwd_state     -
# The sweeps hold the state transposed, (BV, K): the first operand of every product, straight from the accumulator.
# FLOPs per token and head: forward 6 K V + 2 BT V and the solve, backward 16 K V + 6 BT V + 20 BT K + 12 BT^2.

MIN_BETA = tl.constexpr(1e-14)
NOTHING = tl.constexpr(-126.0) # log2 of fp32's smallest normal number, a decay taken as 0
# rows of `gates`: G, e, and for what a token writes, nothing where beta is 0, G - log2(beta), e and r; the segment
GATES, G, E, GW, EW, RW, SEG = map(tl.constexpr, (6, 0, 1, 2, 3, 4, 5))

# launch settings: 168 registers let three blocks of the solve share an SM, which hides its chain of products
SOLVE = dict(num_warps=4, maxnreg=168)

# forward

@triton.jit
def gdn_rows(x, i_b, i_h, t, T, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr):
    """Rows t + [0, BT) of x (B, T, H, D), zero outside of [0, T)."""
    o_t = t + tl.arange(0, BT)
    x += ((i_b.to(tl.int64) * T + o_t) * H + i_h)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(x, mask=((o_t >= 0) & (o_t < T))[:, None], other=0.0)

@triton.jit
def gdn_split(x, DTYPE: tl.constexpr):
    """x in fp32 as the sum of two numbers of type DTYPE, to 2^-16: bf16 is the upper half of the bits. fp32 stays."""
    if DTYPE == tl.float32:
        return x, x
    hi = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True) # a cast there and back is slow
    return hi.to(DTYPE), (x - hi).to(DTYPE)

@triton.jit
def gdn_dot_split(a, b, b_lo, c, PREC: tl.constexpr):
    """c + a (b + b_lo) for sums that cancel: an `a` in fp32 is split too. No b_lo: b is exact."""
    if b.dtype == tl.float32:
        return tl.dot(a, b, c, input_precision=PREC)
    a_hi = a
    if a.dtype == tl.float32:
        a_hi, a_lo = gdn_split(a, b.dtype)
        c = tl.dot(a_lo, b, c)
    if b_lo is not None:
        c = tl.dot(a_hi, b_lo, c)
    return tl.dot(a_hi, b, c)

@triton.jit
def gdn_dot_blocks(a, bt, DTYPE: tl.constexpr, PREC: tl.constexpr):
    """a b for a batch of blocks from a and b^T, both in fp32."""
    b_hi, b_lo = gdn_split(bt, DTYPE)
    return gdn_dot_split(a, tl.permute(b_hi, (0, 2, 1)), tl.permute(b_lo, (0, 2, 1)), None, PREC)

@triton.jit
def gdn_on_diagonal(BT: tl.constexpr):
    """Of a matrix as (BT / 16, 16, BT / 16, 16) blocks, those on the diagonal."""
    o_b = tl.arange(0, BT // 16)
    return o_b[:, None, None, None] == o_b[None, None, :, None]

@triton.jit
def gdn_diagonal_inverse(KK, beta, BT: tl.constexpr, DTYPE: tl.constexpr, PREC: tl.constexpr):
    """(BT / 16, 16, 16): the inverse of I + M in each block of 16 on the diagonal, M = strict_lower(beta * KK).
    Recursive doubling: from N with blocks of 2^p on its diagonal, those of 2^(p+1) gain -N M N below them, which is
    block substitution; a Neumann series would lose all digits for like keys. A warp has a block, and N^T comes along,
    so that each operand is where the product before has left it."""
    NB: tl.constexpr = BT // 16
    b_m = tl.sum(tl.where(gdn_on_diagonal(BT), tl.reshape(KK, (NB, 16, NB, 16)), 0.0), 2)
    b_beta = tl.reshape(beta, (NB, 16))
    o_r, o_c = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    b_mt = tl.where(o_r < o_c, b_m * b_beta[:, None, :], 0.0)
    b_m = tl.where(o_r > o_c, b_m * b_beta[:, :, None], 0.0)
    o_x = o_r ^ o_c # its highest bit p: in one block of 2^(p+1), in two of 2^p
    b_n = tl.where(o_x == 0, 1.0, tl.where(o_x == 1, -b_m, 0.0))
    b_nt = tl.where(o_x == 0, 1.0, tl.where(o_x == 1, -b_mt, 0.0))
    for p in tl.static_range(1, 4):
        # N M, (N M) N and its transpose N^T (N M)^T: NB x (16, 16) x (16, 16)
        b_T = gdn_dot_blocks(b_n, b_mt, DTYPE, PREC)
        b_y = gdn_dot_blocks(b_T, b_nt, DTYPE, PREC)
        b_yt = gdn_dot_blocks(b_nt, b_T, DTYPE, PREC)
        b_n -= tl.where(o_x >> p == 1, b_y, 0.0)
        b_nt -= tl.where(o_x >> p == 1, b_yt, 0.0)
    return b_n

@triton.jit
def gdn_sum_of_segment(x, n_x, y, n_y):
    """Adds up g, for a scan that begins anew where a segment does, and counts the segments."""
    return tl.where(n_y > 0, y, x + y), n_x + n_y

@triton.jit
def gdn_sum_of_pairs(x, n_x, y, n_y):
    """Two sums at once, at the price of one."""
    return x + y, n_x + n_y

@triton.jit(do_not_specialize=["T", "NT"])
def gdn_solve_kernel(q, k, g, beta, seg, A, X, Y, gates, scale, T, NT, H: tl.constexpr, K: tl.constexpr,
                     BT: tl.constexpr, PREC: tl.constexpr):
    """Eqs. (2, 3): A, X^T, Y and the gates of one chunk. Grid (B * NT * H)."""
    DT: tl.constexpr = q.dtype.element_ty
    i = tl.program_id(0)
    i_h, i_t, i_b = i % H, i // H % NT, i // H // NT
    n, t = (i_b * H + i_h) * NT + i_t, i_t * BT
    o_i = tl.arange(0, BT)
    m_t = t + o_i < T
    row = (i_b.to(tl.int64) * T + t) * H + i_h # of a (B, T, H) tensor

    b_g = tl.load(g + row + o_i * H, mask=m_t, other=0.0) * LOG2E
    b_first = tl.zeros([BT], tl.int32) # 1 where a segment begins
    if seg is not None:
        seg += i_b.to(tl.int64) * T + t + o_i
        m_s = m_t & (t + o_i > 0)
        b_first = (m_s & (tl.load(seg, mask=m_s, other=0) != tl.load(seg - 1, mask=m_s, other=0))).to(tl.int32)
    b_first = tl.where(b_g < NOTHING, 1, b_first)
    b_beta = tl.load(beta + row + o_i * H, mask=m_t, other=0.0).to(tl.float32)
    b_q, b_k = gdn_rows(q, i_b, i_h, t, T, H, K, BT), gdn_rows(k, i_b, i_h, t, T, H, K, BT)
    m_w = b_beta > 0
    b_beta = tl.maximum(b_beta, MIN_BETA)
    b_G2, b_s = tl.associative_scan((tl.where(b_first > 0, 0.0, b_g), b_first), 0, gdn_sum_of_segment)
    b_e = tl.where(b_s == 0, tl.exp2(b_G2), 0.0)
    b_GW = b_G2 - tl.log2(b_beta)
    m_e = o_i == BT - 1
    G_end, s_end = tl.reduce((tl.where(m_e, b_G2, 0.0), tl.where(m_e, b_s, 0)), 0, gdn_sum_of_pairs)
    b_r = tl.where(b_s == s_end, tl.exp2(G_end - b_GW), 0.0)

    # k k^T: (BT, K) x (K, BT)
    b_M = tl.dot(b_k, tl.trans(b_k), input_precision=PREC)
    b_n = gdn_diagonal_inverse(b_M, b_beta, BT, DT, PREC)
    b_M = tl.where(o_i[:, None] > o_i[None, :], b_M * b_beta[:, None], 0.0)
    b_hi, b_lo = gdn_split(b_M, DT)
    # blocks of 32 and of 64 from pairs: -N M N below each pair's diagonal blocks. (BT, BT) x (BT, BT), twice each
    b_N = tl.reshape(tl.where(gdn_on_diagonal(BT), b_n[:, :, None, :], 0.0), (BT, BT))
    for p in tl.static_range(4, 6):
        b_T = gdn_dot_split(b_N, b_hi, b_lo, None, PREC)
        n_hi, n_lo = gdn_split(b_N, DT)
        b_y = gdn_dot_split(b_T, n_hi, n_lo, None, PREC)
        b_N -= tl.where((o_i[:, None] ^ o_i[None, :]) >> p == 1, b_y, 0.0)

    m_l = (o_i[:, None] >= o_i[None, :]) & (b_s[:, None] == b_s[None, :])
    b_D = tl.exp2(tl.where(m_l, b_G2[:, None] - b_GW[None, :], float("-inf")))
    if A is not None:
        b_A = (b_N * b_D * (1 / b_beta)[:, None]).to(A.dtype.element_ty)
    # q k^T: (BT, K) x (K, BT); times the inverse: (BT, BT) x (BT, BT)
    b_P = tl.where(m_l, tl.dot(b_q, tl.trans(b_k), input_precision=PREC), 0.0)
    b_hi, b_lo = gdn_split(b_N, DT)
    b_Y = (gdn_dot_split(b_P, b_hi, b_lo, None, PREC) * b_D * scale).to(DT)
    # k^T times the inverse: (K, BT) x (BT, BT)
    b_X = gdn_dot_split(tl.trans(b_k), b_hi, b_lo, None, PREC) * b_r[None, :]
    # all stores last: the fence ahead of a product waits for those on their way
    chunk = n.to(tl.int64) * (BT * BT) + o_i[:, None] * BT + o_i[None, :]
    gates += n.to(tl.int64) * (GATES * BT) + o_i
    tl.store(gates, b_G2)
    tl.store(gates + E * BT, b_e)
    tl.store(gates + GW * BT, tl.where(m_w, b_GW, float("inf")))
    tl.store(gates + EW * BT, tl.where(m_w, b_e, 0.0))
    tl.store(gates + RW * BT, tl.where(m_w, b_r, 0.0))
    tl.store(gates + SEG * BT, b_s.to(tl.float32))
    X = tiled(X, K, BT, K, BT)
    X.store([n, 0, 0], b_X.to(DT).reshape(1, K, BT))
    if A is not None:
        tl.store(A + chunk, b_A)
    tl.store(Y + chunk, b_Y)

@triton.jit
def gdn_square(x, n, BT: tl.constexpr):
    """Matrix n of x (chunks, BT, BT)."""
    o_i = tl.arange(0, BT)
    return tl.load(x + n.to(tl.int64) * (BT * BT) + o_i[:, None] * BT + o_i[None, :])

@triton.jit(do_not_specialize=["T", "NT", "NS"])
def gdn_fwd_kernel(q, k, v, X, Y, gates, S0, o, W, S1, scale, T, NT, NS, H: tl.constexpr, K: tl.constexpr,
                   V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr,
                   PHI: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr):
    """Eq. (4) over one of NS parts of T, from S0 to S1 (B, H, NS, V, K); o if OUT, W if SAVE. PHI: the state
    starts as the identity and v is 0, so that S1 is the part's transition. Grid (B * H * NS * V / BV)."""
    i = tl.program_id(0)
    i_v, i_s, i_bh = i % (V // BV) * BV, i // (V // BV) % NS, i // (V // BV) // NS
    i_b, i_h = i_bh // H, i_bh % H
    row = i_bh.to(tl.int64) * NS + i_s
    o_i, o_k, o_v = tl.arange(0, BT), tl.arange(0, K)[None, :], i_v + tl.arange(0, BV)[:, None]
    state = (row * V + o_v) * K + o_k
    if PHI:
        b_S = tl.where(o_v == o_k, 1.0, 0.0)
    elif S0 is None:
        b_S = tl.zeros([BV, K], dtype=tl.float32)
    else:
        b_S = tl.load(S0 + state)

    q, k, X, Y = tiled(q, T, H * K, BT, K), tiled(k, T, H * K, BT, K), tiled(X, K, BT, K, BT), tiled(Y, BT, BT, BT, BT)
    v, o = tiled(v, T, H * V, BT, BV), tiled(o, T, H * V, BT, BV)
    if SAVE:
        W = tiled(W, BT, V, BT, BV)
    LS = tl.cdiv(NT, NS) # chunks a part
    first, end = i_s * LS, tl.minimum(i_s * LS + LS, NT)
    for i_t in tl.range(first, end, num_stages=STAGES):
        n, t = i_bh * NT + i_t, i_t * BT
        e = gates + n.to(tl.int64) * (GATES * BT) + E * BT
        b_d = tl.load(e + BT - 1)
        b_k = k.load([i_b, t, i_h * K]).reshape(BT, K)
        b_X = X.load([n, 0, 0]).reshape(K, BT)
        b_e = tl.load(e + o_i)
        b_h = b_S.to(b_k.dtype)
        # W^T = (v - e * (k S))^T: (BV, K) x (K, BT)
        b_w = tl.dot(b_h, tl.trans(b_k), input_precision=PREC) * -b_e[None, :]
        if not PHI:
            b_w += tl.trans(v.load([i_b, t, i_h * V + i_v]).reshape(BT, BV))
        b_w = b_w.to(b_k.dtype)
        if SAVE:
            W.store([n, 0, i_v], tl.trans(b_w).reshape(1, BT, BV))
        if OUT:
            # o^T = s e * (q S)^T + W^T Y^T: (BV, K) x (K, BT), (BV, BT) x (BT, BT)
            b_q = q.load([i_b, t, i_h * K]).reshape(BT, K)
            b_o = tl.dot(b_h, tl.trans(b_q), input_precision=PREC) * (b_e * scale)[None, :]
            b_o = tl.dot(b_w, tl.trans(Y.load([n, 0, 0]).reshape(BT, BT)), b_o, input_precision=PREC)
            o.store([i_b, t, i_h * V + i_v], tl.trans(b_o).to(b_k.dtype).reshape(1, BT, BV))
        # S'^T = d S^T + W^T X: (BV, BT) x (BT, K)
        b_S = tl.dot(b_w, tl.trans(b_X), b_S * b_d, input_precision=PREC)
    tl.store(S1 + state, b_S)

@triton.jit(do_not_specialize=["NS"])
def gdn_fold_kernel(S, phi, S0, X, NS, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
                    BACK: tl.constexpr):
    """The state X (B, H, NS, V, K) that enters each part, X^T_{s+1} = X^T_s phi^T_s + S^T_s from S0; with BACK the
    gradient of the state that leaves each, from the last on, X^T_{s-1} = X^T_s phi_s + S^T_s. Grid (B * H * V / BV)."""
    i_v, i_bh = tl.program_id(0) % (V // BV) * BV, tl.program_id(0).to(tl.int64) // (V // BV)
    o_v, o_k = i_v + tl.arange(0, BV)[:, None], tl.arange(0, K)
    x = (i_bh * NS + (NS - 1 if BACK else 0)) * V * K + o_v * K
    if S0 is None:
        tl.store(X + x + o_k[None, :], tl.zeros([BV, K], dtype=tl.float32))
    else:
        tl.store(X + x + o_k[None, :], tl.load(S0 + (i_bh * V + o_v) * K + o_k[None, :]))
    for i_s in range(NS - 1):
        s = i_bh * NS + (NS - 1 - i_s if BACK else i_s)
        tl.debug_barrier() # the row was stored by other threads
        b_x = tl.load(X + s * V * K + o_v * K + o_k[None, :])
        for i_k in range(0, K, BK):
            o_n = i_k + tl.arange(0, BK)
            at = s * V * K + o_v * K + o_n[None, :]
            o_p = o_n[None, :] * K + o_k[:, None] if BACK else o_k[:, None] * K + o_n[None, :]
            b_phi = tl.load(phi + s * K * K + o_p)
            # (BV, K) x (K, BK), fp32: the composition adds no error of its own
            b_y = tl.dot(b_x, b_phi, tl.load(S + at), input_precision="tf32x3")
            tl.store(X + at + (-V * K if BACK else V * K), b_y)

# backward

@triton.jit(do_not_specialize=["NT", "NS"])
def gdn_states_kernel(W, X, gates, S0, h, NT, NS, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                      BV: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr):
    """The state that enters each chunk of one of NS parts of T, as forward had it. Grid (B * H * NS * V / BV)."""
    i = tl.program_id(0)
    i_v, i_s, i_bh = i % (V // BV) * BV, i // (V // BV) % NS, i // (V // BV) // NS
    row = i_bh.to(tl.int64) * NS + i_s
    b_S = tl.zeros([BV, K], dtype=tl.float32)
    if S0 is not None:
        b_S += tl.load(S0 + (row * V + i_v + tl.arange(0, BV)[:, None]) * K + tl.arange(0, K)[None, :])
    W, X, h = tiled(W, BT, V, BT, BV), tiled(X, K, BT, K, BT), tiled(h, V, K, BV, K)
    LS = tl.cdiv(NT, NS) # chunks a part
    for i_t in tl.range(i_s * LS, tl.minimum(i_s * LS + LS, NT), num_stages=STAGES):
        n = i_bh * NT + i_t
        b_d = tl.load(gates + n.to(tl.int64) * (GATES * BT) + E * BT + BT - 1)
        b_W, b_X = W.load([n, 0, i_v]).reshape(BT, BV), X.load([n, 0, 0]).reshape(K, BT)
        h.store([n, i_v, 0], b_S.to(b_W.dtype).reshape(1, BV, K))
        # S'^T = d S^T + W^T X: (BV, BT) x (BT, K)
        b_S = tl.dot(tl.trans(b_W), tl.trans(b_X), b_S * b_d, input_precision=PREC)

@triton.jit(do_not_specialize=["T", "NT", "NS"])
def gdn_bwd_state_kernel(q, k, do, X, Y, gates, dS1, dv, dh, dS0, scale, T, NT, NS, H: tl.constexpr, K: tl.constexpr,
                         V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, OUT: tl.constexpr,
                         STAGES: tl.constexpr, PREC: tl.constexpr):
    """Eq. (5) over one of NS parts of T, from dS1 to dS0 (B, H, NS, V, K); dv and dh if OUT.
    Grid (B * H * NS * V / BV)."""
    i = tl.program_id(0)
    i_v, i_s, i_bh = i % (V // BV) * BV, i // (V // BV) % NS, i // (V // BV) // NS
    i_b, i_h = i_bh // H, i_bh % H
    row = i_bh.to(tl.int64) * NS + i_s
    o_i = tl.arange(0, BT)
    state = (row * V + i_v + tl.arange(0, BV)[:, None]) * K + tl.arange(0, K)[None, :]
    if dS1 is None:
        b_dS = tl.zeros([BV, K], dtype=tl.float32)
    else:
        b_dS = tl.load(dS1 + state)

    k, X, gates = tiled(k, T, H * K, BT, K), tiled(X, K, BT, K, BT), tiled(gates, GATES, BT, 1, BT)
    do, dv, dh = tiled(do, T, H * V, BT, BV), tiled(dv, T, H * V, BT, BV), tiled(dh, V, K, BV, K)
    # a chunk of as many tokens as K has takes most of dS' away: a small difference, from operands of two terms
    NARROW: tl.constexpr = K <= BT
    LS = tl.cdiv(NT, NS) # chunks a part
    first, last = i_s * LS, tl.minimum(i_s * LS + LS, NT)
    # q and Y are fetched by hand, a chunk ahead: registers and one buffer, where the pipeline would hold three
    b_q = gdn_rows(q, i_b, i_h, (last - 1) * BT, T, H, K, BT)
    b_Y = gdn_square(Y, i_bh * NT + last - 1, BT)
    for i_r in tl.range(0, last - first, num_stages=STAGES):
        i_t = last - 1 - i_r
        n, t = i_bh * NT + i_t, i_t * BT
        # by TMA: plain loads, which forward has, take 5 us more with V = 256 and 90 with 128 (H200, B=32 T=2048)
        b_e = gates.load([n, E, 0]).reshape(BT)
        b_d = tl.sum(tl.where(o_i == BT - 1, b_e, 0.0), 0)
        b_X = X.load([n, 0, 0]).reshape(K, BT)
        b_do = do.load([i_b, t, i_h * V + i_v]).reshape(BT, BV)
        b_k = k.load([i_b, t, i_h * K]).reshape(BT, K)
        # dv^T = do^T Y + dS'^T X^T: (BV, BT) x (BT, BT), (BV, K) x (K, BT). Alike keys, too, take most of dS' away
        if OUT:
            dh.store([n, i_v, 0], b_dS.to(b_k.dtype).reshape(1, BV, K))
        b_dv = tl.dot(tl.trans(b_do), b_Y, input_precision=PREC)
        b_dv = gdn_dot_split(b_dS, b_X, None, b_dv, PREC)
        b_Y = gdn_square(Y, i_bh * NT + tl.maximum(i_t - 1, 0), BT)
        # dS^T = d dS'^T + (s e * do)^T q - (e * dv)^T k: (BV, BT) x (BT, K), twice
        b_q = (b_q * (b_e * scale)[:, None]).to(b_k.dtype)
        b_dS = tl.dot(tl.trans(b_do), b_q, b_dS * b_d, input_precision=PREC)
        b_q = gdn_rows(q, i_b, i_h, t - BT, T, H, K, BT)
        if OUT:
            dv.store([i_b, t, i_h * V + i_v], tl.trans(b_dv).to(b_k.dtype).reshape(1, BT, BV))
        b_dv *= -b_e[None, :]
        b_dS = gdn_dot_split(b_dv if NARROW else b_dv.to(b_k.dtype), b_k, None, b_dS, PREC)
    tl.store(dS0 + state, b_dS)

@triton.jit(do_not_specialize=["T", "NT"])
def gdn_bwd_grad_kernel(q, k, W, do, dv, A, h, dh, gates, beta, dq, dk, dg, dbeta, scale, T, NT,
                        H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
                        STAGES: tl.constexpr, PREC: tl.constexpr):
    """Eqs. (6-10) of one chunk: first dq, with dP and dkk, then dk and dg. Grid (B * NT * H)."""
    i = tl.program_id(0)
    i_h, i_t, i_b = i % H, i // H % NT, i // H // NT
    n, t = (i_b * H + i_h) * NT + i_t, i_t * BT
    g = gates + n.to(tl.int64) * (GATES * BT)
    o_i = tl.arange(0, BT)
    m_t = t + o_i < T
    m_d, m_l = o_i[:, None] == o_i[None, :], o_i[:, None] > o_i[None, :]
    row = (i_b.to(tl.int64) * T + t + o_i) * H + i_h # of a (B, T, H) tensor
    q, k = tiled(q, T, H * K, BT, K), tiled(k, T, H * K, BT, K)
    dq, dk = tiled(dq, T, H * K, BT, K), tiled(dk, T, H * K, BT, K)
    W, do, dv = tiled(W, BT, V, BT, BV), tiled(do, T, H * V, BT, BV), tiled(dv, T, H * V, BT, BV)
    h, dh = tiled(h, V, K, BV, K), tiled(dh, V, K, BV, K)
    # A ahead of each loop, on its way while that runs, e and r ahead of the second; all else where it is used: two
    # programs share an SM, and each register more is one spilled
    b_A = gdn_square(A, n, BT)
    b_dq = tl.zeros([BT, K], dtype=tl.float32)
    b_dP, b_Z = tl.zeros([BT, BT], dtype=tl.float32), tl.zeros([BT, BT], dtype=tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_h = h.load([n, i_v, 0]).reshape(BV, K)
        b_W = W.load([n, 0, i_v]).reshape(BT, BV)
        b_do = do.load([i_b, t, i_h * V + i_v]).reshape(BT, BV)
        b_dv = dv.load([i_b, t, i_h * V + i_v]).reshape(BT, BV)
        # do S^T: (BT, BV) x (BV, K);  do W^T, dv W^T: (BT, BV) x (BV, BT)
        b_dq = tl.dot(b_do, b_h, b_dq, input_precision=PREC)
        b_dP = tl.dot(b_do, tl.trans(b_W), b_dP, input_precision=PREC)
        b_Z = tl.dot(b_dv, tl.trans(b_W), b_Z, input_precision=PREC)

    b_hi, b_lo = gdn_split(b_A.to(tl.float32), q.dtype)
    # do u^T and dv u^T by eq. (7): (BT, BT) x (BT, BT)
    b_dP = gdn_dot_split(b_dP, tl.trans(b_hi), tl.trans(b_lo), None, PREC)
    b_Z = gdn_dot_split(b_Z, tl.trans(b_hi), tl.trans(b_lo), None, PREC)
    b_beta = tl.load(beta + row, mask=m_t, other=1.0).to(tl.float32)
    b_G, b_GW, b_E = tl.load(g + G * BT + o_i), tl.load(g + GW * BT + o_i), tl.load(g + E * BT + o_i)
    b_s = tl.load(g + SEG * BT + o_i)
    b_q, b_k = q.load([i_b, t, i_h * K]).reshape(BT, K), k.load([i_b, t, i_h * K]).reshape(BT, K)
    b_dbeta = tl.sum(tl.where(m_d, b_Z, 0.0), 1) / tl.maximum(b_beta, MIN_BETA)
    tl.store(dbeta + row, b_dbeta.to(dbeta.dtype.element_ty), mask=m_t)
    m_s = (m_d | m_l) & (b_s[:, None] == b_s[None, :])
    b_D = tl.exp2(tl.where(m_s, b_G[:, None] - b_GW[None, :], float("-inf")))
    b_dP *= b_D * scale
    b_Z = tl.where(m_l, -b_Z * b_D, 0.0) # dkk from here on
    # q k^T, k k^T: (BT, K) x (K, BT). The diagonal of H adds to a row what it takes from the same column: left out, its
    # rounding would swamp dg where the gates are strong
    b_H = tl.where(m_l, b_dP * tl.dot(b_q, tl.trans(b_k), input_precision=PREC), 0.0)
    b_H += b_Z * tl.dot(b_k, tl.trans(b_k), input_precision=PREC)
    b_dq *= (b_E * scale)[:, None]
    b_a = tl.sum(b_H, 1) - tl.sum(b_H, 0) + tl.sum(b_q * b_dq, 1)
    # dP k: (BT, BT) x (BT, K), where like keys take from each other
    b_dq = gdn_dot_split(b_dP, b_k, None, b_dq, PREC)
    b_dPh, b_Z = b_dP.to(b_k.dtype), b_Z.to(b_k.dtype)
    dq.store([i_b, t, i_h * K], b_dq.to(b_k.dtype).reshape(1, BT, K))

    b_A = gdn_square(A, n, BT)
    b_EW, b_RW, b_d = tl.load(g + EW * BT + o_i), tl.load(g + RW * BT + o_i), tl.load(g + E * BT + BT - 1)
    b_dk, b_ks = tl.zeros([BT, K], dtype=tl.float32), tl.zeros([BT, K], dtype=tl.float32)
    b_hh = tl.zeros([BV, BV], dtype=tl.float32) # S^T dS': the sum of its diagonal is <S, dS'>
    for i in tl.range(0, V, BV, num_stages=STAGES): # the last tiles first: they are in the L2 cache still
        i_v = V - BV - i
        b_h = h.load([n, i_v, 0]).reshape(BV, K)
        b_W = W.load([n, 0, i_v]).reshape(BT, BV)
        b_dh = dh.load([n, i_v, 0]).reshape(BV, K)
        b_dv = dv.load([i_b, t, i_h * V + i_v]).reshape(BT, BV)
        # S^T dS': (BV, K) x (K, BV);  dv S^T, W dS'^T: (BT, BV) x (BV, K)
        b_hh = tl.dot(b_h, tl.trans(b_dh), b_hh, input_precision=PREC)
        b_dk = tl.dot(b_dv, b_h, b_dk, input_precision=PREC)
        b_ks = tl.dot(b_W, b_dh, b_ks, input_precision=PREC)
    o_v = tl.arange(0, BV)
    b_hh = tl.sum(tl.where(o_v[:, None] == o_v[None, :], b_hh, 0.0))
    # u dS'^T by eq. (7): (BT, BT) x (BT, K)
    b_hi, b_lo = gdn_split(b_ks, q.dtype)
    b_ks = gdn_dot_split(b_A.to(tl.float32), b_hi, b_lo, None, PREC)
    b_k = k.load([i_b, t, i_h * K]).reshape(BT, K)
    b_dk *= -b_EW[:, None]
    b_ks *= b_RW[:, None]
    b_a += tl.sum(b_k * b_dk, 1)
    b_b = tl.sum(b_k * b_ks, 1)
    b_q = q.load([i_b, t, i_h * K]).reshape(BT, K)
    # q^T dP, k^T dkk, k^T dkk^T: (K, BT) x (BT, BT), since no result may be transposed to be a first operand
    b_kT = tl.trans(b_k)
    b_i = tl.dot(tl.trans(b_q), b_dPh, input_precision=PREC)
    b_i = tl.dot(b_kT, b_Z, b_i, input_precision=PREC)
    b_i = tl.dot(b_kT, tl.trans(b_Z), b_i, input_precision=PREC)
    b_dk += b_ks + tl.trans(b_i)
    dk.store([i_b, t, i_h * K], b_dk.to(b_k.dtype).reshape(1, BT, K))
    b_s = tl.load(g + SEG * BT + o_i)
    # dg_t: a from t on, b before t, of its segment. The sum over all tokens less what follows would cancel
    b_dg = tl.where(o_i[None, :] >= o_i[:, None], b_a[None, :], b_b[None, :])
    b_dg = tl.sum(tl.where(b_s[:, None] == b_s[None, :], b_dg, 0.0), 1)
    tl.store(dg + row, b_dg + b_d * b_hh, mask=m_t)

@triton.jit(do_not_specialize=["rows"])
def gdn_bwd_finish_kernel(beta, dv, rows, V: tl.constexpr, ROWS: tl.constexpr):
    """dv = 0 where beta is 0, by rows of (B, T, H): until here its scaled gradient served dbeta. Grid (rows / ROWS)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b_beta = tl.load(beta + row, mask=row < rows, other=1.0)
    if tl.min(b_beta, 0) <= 0:
        for i in range(0, V, 16):
            o_v = i + tl.arange(0, 16)
            tl.store(dv + row[:, None] * V + o_v[None, :], tl.zeros([ROWS, 16], dtype=dv.dtype.element_ty),
                     mask=(b_beta <= 0)[:, None])

# one token

@triton.jit
def gdn_step_kernel(q, k, v, g, beta, state, o, scale, s_b, s_h, s_k, s_v, H: tl.constexpr, K: tl.constexpr,
                    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Eq. (1), the state in place, any strides. Grid (B * H * V / BV)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_bh, o_k = tl.program_id(0).to(tl.int64) // NV, tl.arange(0, BK)
    o_v = tl.program_id(0) % NV * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    state += i_bh // H * s_b + i_bh % H * s_h + o_v[:, None] * s_v + o_k[None, :] * s_k
    mask = m_v[:, None] & m_k[None, :]
    after_the_last_kernel()
    b_S = tl.load(state, mask=mask, other=0.0) # (BV, BK), S^T
    b_k = tl.load(k + i_bh * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
    b_q = tl.load(q + i_bh * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
    b_v = tl.load(v + i_bh * V + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_g, b_beta = tl.load(g + i_bh), tl.load(beta + i_bh).to(tl.float32)
    b_S *= tl.exp2(b_g * LOG2E)
    b_u = b_beta * (b_v - tl.sum(b_S * b_k, 1))
    b_S += b_u[:, None] * b_k
    tl.store(state, b_S, mask=mask)
    tl.store(o + i_bh * V + o_v, (tl.sum(b_S * b_q, 1) * scale).to(o.dtype.element_ty), mask=m_v)

# launch

def gdn_parts(programs, NT, device):
    """Parts a sequence is cut into so that its `programs` sweeps fill the GPU. Each part is swept twice more, for its
    own state and its transition, which pays from three parts on."""
    NS = min(multiprocessors(device) // programs, NT // 8)
    return cdiv(NT, cdiv(NT, NS)) if NS >= 3 else 1

def gdn_solve_settings(x):
    if small(x.device):
        return dict(num_warps=8)
    return SOLVE if x.dtype == torch.bfloat16 and x.shape[-1] <= 128 else dict(num_warps=4)

def gdn_sparing(x):
    """Whether tensors like x take small tiles: fp32 ones, and all on a GPU with little shared memory."""
    return INTERPRET or x.dtype == torch.float32 or small(x.device)

def gdn_sweep_settings(x, K, V):
    """Tile and launch settings of both sweeps over tensors like x."""
    if gdn_sparing(x):
        # compiled for sm_80 with Triton 3.6: 96 KB at most, but with such keys 128 in the sweeps, 160 in the gradients
        assert x.dtype == torch.bfloat16 or K <= 128 or shared_memory(x.device) >= 160 * 1024, \
            f"float32 with K above 128 needs 160 KB of shared memory, this GPU has {shared_memory(x.device) >> 10}"
        fast = x.dtype == torch.bfloat16 and K <= 128
        # with four warps and fp32, ptxas falls to 32 registers and 12 KB of stack a thread (K = 128, sm_90a)
        return dict(BV=32, STAGES=2 if fast else 1, num_warps=8)
    if K <= 128:
        return dict(BV=min(V, 128), STAGES=3, num_warps=8 if V >= 128 else 4)
    return dict(BV=64, STAGES=1, num_warps=8)

def gdn_states_settings(x, K, V):
    if gdn_sparing(x):
        return gdn_sweep_settings(x, K, V)
    return dict(BV=64, STAGES=3 if K <= 128 else 2, num_warps=4 if K <= 128 else 8)

def gdn_grad_settings(x, K, V):
    if gdn_sparing(x):
        if x.dtype == torch.bfloat16 and K <= 128:
            return dict(BV=16, STAGES=1, num_warps=4)
        return dict(BV=32, STAGES=1, num_warps=8)
    return dict(BV=64, STAGES=2 if K <= 128 else 1, num_warps=4 if K <= 128 else 8)

def precision(dtype):
    """Of the products: exact to fp32 for fp32 tensors; bf16 operands have one way only."""
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"

@torch.library.custom_op("kernels::gdn_fwd", mutates_args=())
def gdn_fwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S0: Optional[Tensor], seg: Optional[Tensor],
            scale: float, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """
    o, the final state (B, H, V, K), and for backward A, X, Y, gates, W, the state that enters each part, where there
    are several, (B, H, NS, V, K), and transitions phi^T (B, H, NS, K, K).
    """
    o, S1, A, X, Y, gates, W, entry, phi = outputs = gdn_fwd_outputs(q, k, v, g, beta, S0, seg, scale, save)
    B, T, H, K = q.shape
    V, NT, NS, PREC = v.shape[-1], Y.shape[2], phi.shape[2], precision(q.dtype)
    X_tiles = gdn_chunks(X, K, BT)

    def sweep(S0, S1, V, OUT=False, PHI=False):
        settings = gdn_sweep_settings(q, K, V)
        BV = settings["BV"]
        gdn_fwd_kernel[(B * H * NS * V // BV,)](
            tiles(q, BT, K), tiles(k, BT, K), tiles(v, BT, BV), X_tiles, gdn_chunks(Y, BT, BT), gates, S0,
            tiles(o, BT, BV), gdn_chunks(W, BT, BV) if save else None, S1, scale, T, NT, NS,
            H=H, K=K, V=V, BT=BT, OUT=OUT, SAVE=save and OUT, PHI=PHI, PREC=PREC, **settings)

    with torch.cuda.device_of(q):
        gdn_solve_kernel[(B * NT * H,)](
            q, k, g, beta, seg, A if save else None, X_tiles, Y, gates, scale, T, NT,
            H=H, K=K, BT=BT, PREC=PREC, **gdn_solve_settings(q))
        if NS == 1:
            sweep(S0, S1, V, OUT=True)
        else:
            part = torch.empty_like(entry)
            sweep(None, part, V)
            sweep(None, phi, K, PHI=True)
            gdn_fold(part, phi, S0, entry)
            sweep(entry, part, V, OUT=True)
            S1.copy_(part[:, :, -1])
    return outputs

@gdn_fwd.register_fake
def gdn_fwd_outputs(q, k, v, g, beta, S0, seg, scale, save):
    (B, T, H, K), V, NT = q.shape, v.shape[-1], cdiv(q.shape[1], BT)
    NS = gdn_parts(B * H * (V // gdn_sweep_settings(q, K, V)["BV"]), NT, q.device)
    per_chunk = lambda x, *shape, dtype=None: x.new_empty(B, H, NT, *shape, dtype=dtype)
    A_dtype = torch.float16 if q.dtype == torch.bfloat16 else torch.float32
    return (torch.empty_like(v), g.new_empty(B, H, V, K), per_chunk(q, BT, BT if save else 0, dtype=A_dtype),
            per_chunk(q, K, BT), per_chunk(q, BT, BT), per_chunk(g, GATES.value, BT),
            per_chunk(v, BT, V) if save else v.new_empty(0), g.new_empty(B, H, NS, V, K if NS > 1 else 0),
            g.new_empty(B, H, NS, K, K if NS > 1 else 0))

def gdn_chunks(x, rows, cols):
    """Descriptor of `rows` x `cols` tiles of x (B, H, NT, ., .), indexed [chunk, row, column]."""
    return tiles(x.flatten(0, 2).unsqueeze(2), rows, cols)

def gdn_fold(part, phi, S0, X, BACK=False):
    B, H, NS, V, K = part.shape
    gdn_fold_kernel[(B * H * V // 16,)](part, phi, S0, X, NS, K=K, V=V, BV=16, BK=64, BACK=BACK, num_warps=4)

@torch.library.custom_op("kernels::gdn_bwd", mutates_args=())
def gdn_bwd(do: Optional[Tensor], dS1: Optional[Tensor], q: Tensor, k: Tensor, beta: Tensor, S0: Optional[Tensor],
            A: Tensor, X: Tensor, Y: Tensor, gates: Tensor, W: Tensor, entry: Tensor, phi: Tensor, scale: float) \
            -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dbeta and the initial state's gradient (B, H, V, K)."""
    outputs = dq, dk, dv, dg, dbeta, dS0 = gdn_bwd_outputs(do, dS1, q, k, beta, S0, A, X, Y, gates, W, entry, phi,
                                                           scale)
    (B, T, H, K), V = q.shape, W.shape[-1]
    NT, NS, PREC = Y.shape[2], phi.shape[2], precision(q.dtype)
    do = torch.zeros_like(dv) if do is None else do.contiguous()
    dS1 = None if dS1 is None else dS1.contiguous()
    h, dh = (q.new_empty(B, H, NT, V, K) for _ in range(2))
    X_tiles = gdn_chunks(X, K, BT)

    def sweep(dS1, dS0, OUT=False):
        settings = gdn_sweep_settings(q, K, V)
        BV = settings["BV"]
        gdn_bwd_state_kernel[(B * H * NS * V // BV,)](
            q, tiles(k, BT, K), tiles(do, BT, BV), X_tiles, Y, gdn_chunks(gates, 1, BT), dS1,
            tiles(dv, BT, BV), gdn_chunks(dh, BV, K), dS0, scale, T, NT, NS,
            H=H, K=K, V=V, BT=BT, OUT=OUT, PREC=PREC, **settings)

    with torch.cuda.device_of(q):
        settings = gdn_states_settings(q, K, V)
        BV = settings["BV"]
        gdn_states_kernel[(B * H * NS * V // BV,)](
            gdn_chunks(W, BT, BV), X_tiles, gates, S0 if NS == 1 else entry, gdn_chunks(h, BV, K), NT, NS,
            K=K, V=V, BT=BT, PREC=PREC, **settings)
        if NS == 1:
            sweep(dS1, dS0, OUT=True)
        else:
            part, leaving = (dS0.new_empty(B, H, NS, V, K) for _ in range(2))
            sweep(None, part)
            gdn_fold(part, phi, dS1, leaving, BACK=True)
            sweep(leaving, part, OUT=True)
            dS0.copy_(part[:, :, 0])
        settings = gdn_grad_settings(q, K, V)
        BV = settings["BV"]
        gdn_bwd_grad_kernel[(B * NT * H,)](
            tiles(q, BT, K), tiles(k, BT, K), gdn_chunks(W, BT, BV), tiles(do, BT, BV), tiles(dv, BT, BV), A,
            gdn_chunks(h, BV, K), gdn_chunks(dh, BV, K), gates, beta, tiles(dq, BT, K), tiles(dk, BT, K), dg, dbeta,
            scale, T, NT, H=H, K=K, V=V, BT=BT, PREC=PREC, **settings)
        gdn_bwd_finish_kernel[(cdiv(B * T * H, 1024),)](beta, dv, B * T * H, V=V, ROWS=1024, num_warps=4)
    return outputs

@gdn_bwd.register_fake
def gdn_bwd_outputs(do, dS1, q, k, beta, S0, A, X, Y, gates, W, entry, phi, scale):
    (B, T, H, K), V = q.shape, W.shape[-1]
    return (torch.empty_like(q), torch.empty_like(k), W.new_empty(B, T, H, V), gates.new_empty(B, T, H),
            torch.empty_like(beta), gates.new_empty(B, H, V, K))

def gdn_setup(ctx, inputs, output):
    q, k, v, g, beta, S0, seg, scale, save = inputs
    ctx.set_materialize_grads(False) # else each extra output gets a gradient of zeros
    ctx.save_for_backward(q, k, beta, S0, *output[2:])
    ctx.scale = scale

def gdn_backward(ctx, do, dS1, *rest):
    dq, dk, dv, dg, dbeta, dS0 = gdn_bwd(do, dS1, *ctx.saved_tensors, ctx.scale)
    return dq, dk, dv, dg, dbeta, dS0 if ctx.saved_tensors[3] is not None else None, None, None, None

gdn_fwd.register_autograd(gdn_backward, setup_context=gdn_setup)

def gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, segment_ids=None):
    """
    Gated delta rule (Yang, Kautz, Hatamizadeh 2024), eq. (1), over a whole sequence.
    q, k (B, T, H, K), unit norm, and v (B, T, H, V): bfloat16 or float32. g (B, T, H) float32, log decay <= 0.
    beta (B, T, H), float32 or q's dtype. scale defaults to K**-0.5. initial_state (B, H, K, V) float32 belongs to the
    first token's segment; segment_ids (B, T) int32, non-decreasing: the state is reset where the id changes.
    Returns o like v, and the final state (B, H, K, V), float32; both are differentiable.
    """
    (B, T, H, K), V, dtype = q.shape, v.shape[-1], q.dtype
    check(q, k, v, [("g", g, (B, T, H), (torch.float32,)), ("beta", beta, (B, T, H), (torch.float32, q.dtype))],
          initial_state, segment_ids)
    S0 = initial_state
    if S0 is not None:
        S0 = widen(widen(S0).transpose(-1, -2)) # (B, H, V, K), K-contiguous
    if segment_ids is not None:
        segment_ids = segment_ids.contiguous()
    q, k, v = exact_if_narrow(q, k, v)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, beta, S0))
    o, S1, *_ = gdn_fwd(widen(q), widen(k), widen(v), g.contiguous(), beta.contiguous(), S0, segment_ids,
                        float(K**-0.5 if scale is None else scale), save)
    S1 = S1.transpose(-1, -2)
    if o.shape[-1] != V: # else the slice's backward would copy
        o, S1 = o[..., :V], S1[..., :V]
    return o.to(dtype), S1 if S1.shape[-2] == K else S1[..., :K, :]

@torch.library.custom_op("kernels::gdn_step", mutates_args={"state"})
def gdn_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Tensor:
    (B, H, K), V = q.shape, v.shape[-1]
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    o, BV = torch.empty_like(v), step_values(B * H * V, q.device)
    with torch.cuda.device_of(q):
        gdn_step_kernel[(B * H * cdiv(V, BV),)](q, k, v, g, beta, state, o, scale, *state.stride(), H=H, K=K, V=V,
                                                BK=1 << (K - 1).bit_length(), BV=BV, num_warps=4,
                                                launch_pdl=has_tma(q.device))
    return o

@gdn_step.register_fake
def _(q, k, v, g, beta, state, scale):
    return v.new_empty(v.shape)

def gated_delta_rule_step(q, k, v, g, beta, state, scale=None):
    """One token of `gated_delta_rule`: q, k (B, H, K), v (B, H, V), g, beta (B, H); state (B, H, K, V) float32 is
    updated in place, whatever its strides. Returns o like v. No gradient."""
    gates = [("g", g, q.shape[:2], (torch.float32,)), ("beta", beta, q.shape[:2], (torch.float32, q.dtype))]
    check(q, k, v, gates, state)
    return gdn_step(q, k, v, g, beta, state, float(q.shape[-1]**-0.5 if scale is None else scale))

# ----------------------------------------------------------------------------------------------------------------------
# the short convolution in front of the mixer
#
#   p_t = sum_{s<4} w_s x_{t-s} over the tokens of t's segment,   y_t = silu(p_t) = p_t sigma(p_t),            (1)
# and for q and k the unit vector z_t = r_t y_t, r_t = (|y_t|^2 + 1e-6)^{-1/2}. Backward:
#   dy_t = r_t dz_t - r_t^3 (dz_t . y_t) y_t,   dp_t = sigma(p_t) (1 + p_t (1 - sigma(p_t))) dy_t,             (2)
#   dx_t = sum_s w_s dp_{t+s} over t's segment,   dw_s = sum_t dp_t x_{t-s}.                                   (3)
# Both directions walk over the tokens with the last four in registers, so each tensor crosses the memory bus once. A
# program, mostly a warp, walks over a stretch of tokens for one head's channels, or 128, and loads four tokens at a
# time. Backward begins with the next stretch's first four, and asks for the four to come before it works on these.

CONV_TOKENS, TAPS = 128, 4

@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) in 4 instructions, 0 where it is denormal (x < -87); tl.sigmoid takes 11 to keep such numbers."""
    if COMPILED_FOR_A_GPU:
        return tl.inline_asm_elementwise("""{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }""", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.sigmoid(x)

@triton.jit
def stretch(per_row, in_all, T, TOKENS: tl.constexpr):
    """
    This program's block of channels and its stretch, of per_row stretches a row and in_all; the stretch's first token
    in its row, and among the tokens of all rows.
    """
    i_c, i_n = tl.program_id(0) // in_all, tl.program_id(0) % in_all
    t_0 = i_n % per_row * TOKENS
    return i_c, i_n, t_0, (i_n // per_row).to(tl.int64) * T + t_0

@triton.jit
def four(x, i, t_0, T, stride: tl.constexpr, o_d, end, step: tl.constexpr):
    """Channels o_d below `end` of token i from t_0 on, where x points to, and of i + step to i + 3 step; else zero."""
    rows = ()
    for j in tl.static_range(4):
        t = t_0 + i + j * step
        rows = rows + (tl.load(x + (i + j * step) * stride, mask=o_d < tl.where((t >= 0) & (t < T), end, 0), other=0),)
    return rows

@triton.jit
def four_ids(seg, i, t_0, T, step: tl.constexpr):
    """The segments of these tokens, or of the nearest one where there is none: x and dz are zero there."""
    ids = ()
    for j in tl.static_range(4):
        ids = ids + (tl.load(seg + tl.minimum(tl.maximum(i + j * step, -t_0), T - 1 - t_0)),)
    return ids

@triton.jit
def taps(w, o_d, end):
    """w_0 to w_3; in memory the current token's is last."""
    w, mask = w + o_d * 4, o_d < end
    return (tl.load(w + 3, mask=mask, other=0.0), tl.load(w + 2, mask=mask, other=0.0),
            tl.load(w + 1, mask=mask, other=0.0), tl.load(w, mask=mask, other=0.0))

@triton.jit
def conv_fwd(x, w, seg, z, i_c, t_0, first, T, offset, stride: tl.constexpr, total: tl.constexpr,
             UNIT: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    """Eq. (1) for block i_c of q's, k's or v's `total` channels, which begin at `offset` of x's."""
    o_d, end = i_c * WIDTH + tl.arange(0, D), tl.minimum((i_c + 1) * WIDTH, total)
    w_0, w_1, w_2, w_3 = taps(w + offset * 4, o_d, end)
    x, z = x + first * stride + offset + o_d, z + first * total + o_d
    x_1, x_2, x_3, _ = four(x, -1, t_0, T, stride, o_d, end, -1) # the tokens before
    x_1, x_2, x_3, id_1 = x_1.to(tl.float32), x_2.to(tl.float32), x_3.to(tl.float32), 0
    if seg is not None:
        seg += first
        id_1, id_2, id_3, _ = four_ids(seg, -1, t_0, T, -1)
        x_2, x_3 = x_2 * tl.where(id_2 == id_1, 1.0, 0.0), x_3 * tl.where(id_3 == id_1, 1.0, 0.0)
    for i in range(0, TOKENS, 4):
        xs = four(x, i, t_0, T, stride, o_d, end, 1)
        if seg is not None:
            ids = four_ids(seg, i, t_0, T, 1)
        for j in tl.static_range(4):
            x_0 = xs[j].to(tl.float32)
            if seg is not None: # a new segment forgets the tokens before it
                same = tl.where(ids[j] == id_1, 1.0, 0.0)
                x_1, x_2, x_3, id_1 = x_1 * same, x_2 * same, x_3 * same, ids[j]
            b_p = w_0 * x_0 + w_1 * x_1 + w_2 * x_2 + w_3 * x_3
            b_z = b_p * sigmoid(b_p)
            if UNIT:
                b_z *= tl.rsqrt(tl.sum(b_z * b_z, 0) + 1e-6)
            here = o_d < tl.where(t_0 + i + j < T, end, 0)
            tl.store(z + (i + j) * total, b_z.to(z.dtype.element_ty), mask=here)
            x_1, x_2, x_3 = x_0, x_1, x_2

# Triton 3.6 cannot compile them with T and the stretches as the constant 1
@triton.jit(do_not_specialize=["per_row", "in_all", "T"])
def conv_fwd_kernel(x, w, seg, q, k, v, per_row, in_all, T, UNIT: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr,
                    WK: tl.constexpr, WV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TOKENS: tl.constexpr):
    """q, k and v, WK or WV channels a program. Grid (blocks of q's, of k's, of v's channels times stretches,)."""
    n: tl.constexpr = (HK + WK - 1) // WK # blocks of q's channels, and of k's
    i_c, _, t_0, first = stretch(per_row, in_all, T, TOKENS)
    if i_c < 2 * n:
        z = q
        if i_c >= n:
            z = k
        conv_fwd(x, w, seg, z, i_c % n, t_0, first, T, i_c // n * HK, 2 * HK + HV, HK, UNIT, WK, DK, TOKENS)
    else:
        conv_fwd(x, w, seg, v, i_c - 2 * n, t_0, first, T, 2 * HK, 2 * HK + HV, HV, False, WV, DV, TOKENS)

@triton.jit
def conv_bwd_four(xs, dzs, ids, w, x, dp, dw, dx, i, t_0, T, o_d, end, stride: tl.constexpr, UNIT: tl.constexpr,
                  OWN: tl.constexpr):
    """
    Eq. (2) and (3) for tokens i + 3 to i of the stretch from t_0 on, where dx points to. xs: x of i to i - 3; dzs: dz
    of i + 3 to i; w: taps; x: of the token in hand and the two before it; dp: of the three after it; dw: sums so far;
    ids: segments of i + 4 to i - 3, None where all are one. Only OWN tokens have dx and count in dw. Returns x, dp and
    dw for the next four.
    """
    w_0, w_1, w_2, w_3 = w
    x_0, x_1, x_2 = x
    dp_1, dp_2, dp_3 = dp
    dw_0, dw_1, dw_2, dw_3 = dw
    for j in tl.static_range(4):
        x_3, b_dy = xs[j].to(tl.float32), dzs[j].to(tl.float32)
        y_1, y_2, y_3 = x_1, x_2, x_3 # what the token sees of them
        if ids is not None: # its own is ids[j + 1]
            y_1 = x_1 * tl.where(ids[j + 2] == ids[j + 1], 1.0, 0.0)
            y_2 = x_2 * tl.where(ids[j + 3] == ids[j + 1], 1.0, 0.0)
            y_3 = x_3 * tl.where(ids[j + 4] == ids[j + 1], 1.0, 0.0)
            same = tl.where(ids[j] == ids[j + 1], 1.0, 0.0)
            dp_1, dp_2, dp_3 = dp_1 * same, dp_2 * same, dp_3 * same
        b_p = w_0 * x_0 + w_1 * y_1 + w_2 * y_2 + w_3 * y_3
        b_s = sigmoid(b_p)
        b_y = b_p * b_s
        if UNIT:
            b_r = tl.rsqrt(tl.sum(b_y * b_y, 0) + 1e-6)
            b_dy = b_r * b_dy - b_r * b_r * b_r * tl.sum(b_dy * b_y, 0) * b_y
        dp_0 = (b_s + b_y * (1 - b_s)) * b_dy
        if OWN:
            b_dx = w_0 * dp_0 + w_1 * dp_1 + w_2 * dp_2 + w_3 * dp_3
            here = o_d < tl.where(t_0 + i + 3 - j < T, end, 0)
            tl.store(dx + (i + 3 - j) * stride, b_dx.to(dx.dtype.element_ty), mask=here)
            dw_0, dw_1, dw_2, dw_3 = dw_0 + dp_0 * x_0, dw_1 + dp_0 * y_1, dw_2 + dp_0 * y_2, dw_3 + dp_0 * y_3
        dp_1, dp_2, dp_3 = dp_0, dp_1, dp_2
        x_0, x_1, x_2 = x_1, x_2, x_3
    return (x_0, x_1, x_2), (dp_1, dp_2, dp_3), (dw_0, dw_1, dw_2, dw_3)

@triton.jit
def conv_bwd(x, w, seg, dz, dx, dw, i_c, i_n, t_0, first, T, offset, stride: tl.constexpr,
             total: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    """Eq. (2) and (3) for a block of channels as in conv_fwd, from the last token to the first; dw of stretch i_n."""
    o_d, end = i_c * WIDTH + tl.arange(0, D), tl.minimum((i_c + 1) * WIDTH, total)
    w, zero = taps(w + offset * 4, o_d, end), tl.zeros([D], tl.float32)
    x, dx, dz = x + first * stride + offset + o_d, dx + first * stride + offset + o_d, dz + first * total + o_d
    # the next stretch's first four tokens, for their dp
    x_0, x_1, x_2, _ = four(x, TOKENS + 3, t_0, T, stride, o_d, end, -1)
    xs = four(x, TOKENS, t_0, T, stride, o_d, end, -1)
    dzs = four(dz, TOKENS + 3, t_0, T, total, o_d, end, -1)
    xs_next = four(x, TOKENS - 4, t_0, T, stride, o_d, end, -1)
    dzs_next = four(dz, TOKENS - 1, t_0, T, total, o_d, end, -1)
    ids, ids_next = None, None
    if seg is not None:
        seg += first
        id_0, id_1, id_2, _ = four_ids(seg, TOKENS + 3, t_0, T, -1)
        ids_next = four_ids(seg, TOKENS, t_0, T, -1)
        ids = (id_0, id_0, id_1, id_2) + ids_next
    b_x, b_dp, b_dw = conv_bwd_four(xs, dzs, ids, w, (x_0.to(tl.float32), x_1.to(tl.float32), x_2.to(tl.float32)),
                                    (zero, zero, zero), (zero, zero, zero, zero), dx, TOKENS, t_0, T, o_d, end, stride,
                                    UNIT, False)
    for i in range(TOKENS - 4, -1, -4):
        xs, dzs, ids = xs_next, dzs_next, None
        xs_next = four(x, i - 4, t_0, T, stride, o_d, end, -1)
        dzs_next = four(dz, i - 1, t_0, T, total, o_d, end, -1)
        if seg is not None:
            ids = ids_next + four_ids(seg, i, t_0, T, -1)
            ids_next = (ids[4], ids[5], ids[6], ids[7])
        if ids is None or ids[0] == ids[7]:
            b_x, b_dp, b_dw = conv_bwd_four(xs, dzs, None, w, b_x, b_dp, b_dw, dx, i, t_0, T, o_d, end, stride, UNIT,
                                            True)
        else: # rarely: this takes 96 products more, of 740 instructions
            b_x, b_dp, b_dw = conv_bwd_four(xs, dzs, ids, w, b_x, b_dp, b_dw, dx, i, t_0, T, o_d, end, stride, UNIT,
                                            True)
    dw += (i_n.to(tl.int64) * stride + offset + o_d) * 4
    for s in tl.static_range(4):
        tl.store(dw + 3 - s, b_dw[s], mask=o_d < end)

@triton.jit(do_not_specialize=["per_row", "in_all", "T"])
def conv_bwd_kernel(x, w, seg, dq, dk, dv, dx, dw, per_row, in_all, T, UNIT: tl.constexpr, HK: tl.constexpr,
                    HV: tl.constexpr, WK: tl.constexpr, WV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
                    TOKENS: tl.constexpr):
    """dx and, a stretch, dw. Grid as forward."""
    n: tl.constexpr = (HK + WK - 1) // WK
    i_c, i_n, t_0, first = stretch(per_row, in_all, T, TOKENS)
    if i_c < 2 * n:
        dz = dq
        if i_c >= n:
            dz = dk
        conv_bwd(x, w, seg, dz, dx, dw, i_c % n, i_n, t_0, first, T, i_c // n * HK, 2 * HK + HV, HK, UNIT, WK, DK,
                 TOKENS)
    else:
        conv_bwd(x, w, seg, dv, dx, dw, i_c - 2 * n, i_n, t_0, first, T, 2 * HK, 2 * HK + HV, HV, False, WV, DV, TOKENS)

@functools.cache
def conv_settings(B, T, H, K, V, unit, tokens):
    """Stretches a row and in all, grid and options for stretches of `tokens`, or fewer where T is short."""
    tokens, HK, HV = max(4, min(tokens, triton.next_power_of_2(T))), H * K, H * V
    WK, WV = K if unit else min(128, HK), min(128, HV) # a head, whose length is wanted, or 128 channels
    DK, DV = triton.next_power_of_2(WK), triton.next_power_of_2(WV)
    per_row = cdiv(T, tokens)
    grid = B * per_row * (2 * cdiv(HK, WK) + cdiv(HV, WV)),
    return per_row, B * per_row, grid, dict(UNIT=unit, HK=HK, HV=HV, WK=WK, WV=WV, DK=DK, DV=DV, TOKENS=tokens,
                                            num_warps=max(1, DK // 128)) # at most 4 channels a lane

@torch.library.custom_op("kernels::short_conv", mutates_args=())
def short_conv_op(x: Tensor, weight: Tensor, segment_ids: Optional[Tensor], H: int, K: int, V: int,
                  unit: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, T, _ = x.shape
    per_row, in_all, grid, settings = conv_settings(B, T, H, K, V, unit, CONV_TOKENS)
    q, k, v = (x.new_empty(B, T, H, D) for D in (K, K, V))
    with torch.cuda.device_of(x):
        conv_fwd_kernel[grid](x, weight, segment_ids, q, k, v, per_row, in_all, T, **settings)
    return q, k, v

@torch.library.custom_op("kernels::short_conv_backward", mutates_args=())
def short_conv_backward_op(x: Tensor, weight: Tensor, segment_ids: Optional[Tensor], dq: Tensor, dk: Tensor, dv: Tensor,
                           H: int, K: int, V: int, unit: bool) -> tuple[Tensor, Tensor]:
    B, T, _ = x.shape
    per_row, in_all, grid, settings = conv_settings(B, T, H, K, V, unit, 2 * CONV_TOKENS) # half the sums of dw
    dx = torch.empty_like(x)
    dw = torch.empty(in_all, *weight.shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        # 128 registers, which spills 16 to 32 bytes (K 128, bf16): with more, 12 programs fit an SM in place of 16
        conv_bwd_kernel[grid](x, weight, segment_ids, dq, dk, dv, dx, dw, per_row, in_all, T, **settings, maxnreg=128)
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

def short_conv_backward(ctx, *dz):
    x, weight, segment_ids = ctx.saved_tensors
    dx, dw = short_conv_backward_op(x, weight, segment_ids, *(d.contiguous() for d in dz), *ctx.shape)
    return dx, dw, None, None, None, None, None

short_conv_op.register_autograd(short_conv_backward, setup_context=short_conv_setup)

def short_conv(x, weight, H, K, V, unit, segment_ids=None):
    """
    q, k (B, T, H, K) and v (B, T, H, V) out of x (B, T, H (K + K + V)) by a causal depthwise convolution over up to
    four tokens of a segment, then SiLU; with `unit`, q and k are scaled to unit length. weight (H (K + K + V), 1 to 4)
    fp32, its last column the current token's; segment_ids (B, T) int32, non-decreasing. x bf16 or fp32, computed in
    fp32.
    """
    assert weight.shape[1] <= TAPS, f"conv_size must be at most {TAPS} on a GPU, got {weight.shape[1]}"
    D = H * (K + K + V)
    assert x.shape[-1] == len(weight) == D, \
        f"x and weight must have H (K + K + V) = {D} channels, got {x.shape[-1]} and {len(weight)}"
    check_each(("segment_ids", segment_ids, x.shape[:2], (torch.int32,)), device=x.device)
    if segment_ids is not None:
        segment_ids = segment_ids.contiguous()
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

CE_ROWS = 8192 # tokens a chunk: 824 MB of bf16 logits at 50,304 columns; 10% faster than 4096 (dev/log.md)

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

# ----------------------------------------------------------------------------------------------------------------------
# one token through a block, and norms without gradients
#
# With one token a sequence a product W x is bound by reading W, 1 us for 4 MB on an H200, and by a kernel's own few us
# of starting, waiting for its first bytes and ending. So a block is seven launches,
#   p, z = W_in n(x), W_gate n(x),   q k v g from p,   o by the step,   u = n(o) silu(z),   x' = x + W_out u,
#   h = silu(W_1 n(x')) (W_2 n(x')),   x'' = x' + W_3 h,                                                             (1)
# where n(x) = x / rms(x): the norms' gains are in the matrices that follow (sample.py, for_inference). 1 / rms(x) is a
# number per token, so it is put on the sums, and what makes x leaves its sum of squares over each tile of rows, too:
#   W n(x) = (W x) / rms(x),   rms(x)^2 = sum_tiles squares / C + eps.                                               (2)
# That leaves the loop over K nothing but copies and products. Each of G warps sums its share of a block's columns, as a
# batch of its own, (G, BN, BK/G) by (G, BK/G, BB): no two do the same work, and the chain of dependent products is 1/G
# as long. With more than 16 sequences it is one product of all warps, for wgmma. W is in x's dtype, or int8 with a
# scale per row: int8 is exact in bf16, so that scale is put on the sums too.

@triton.jit
def rms_norm_kernel(x, weight, gate, y, eps, N, stride, D, H: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """x / rms(x) * weight, times silu(gate) where there is one, of N rows of D. Grid (N / ROWS,)."""
    o_n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    mask = (o_n < N) & (o_d < D)
    after_the_last_kernel()
    b_x = tl.load(x + o_n * D + o_d, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.0)
    if gate is not None: # H rows of it lie side by side, the next H `stride` further on
        b_z = tl.load(gate + o_n // H * stride + o_n % H * D + o_d, mask=mask, other=0.0).to(tl.float32)
        b_w *= b_z * tl.sigmoid(b_z)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1, keep_dims=True) / D + eps) * b_w
    tl.store(y + o_n * D + o_d, b_y.to(y.dtype.element_ty), mask=mask)

@triton.jit
def linear_step_kernel(x, w, scale, w2, scale2, squares, residual, y, squares_y, eps, B, N, N2, TILES, K: tl.constexpr,
                       PAIR: tl.constexpr, BT: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                       G: tl.constexpr):
    """A product of (1) by (2), as y^T = W x^T. Grid (tiles of W's rows, and then of W2's but in a PAIR; B / BB)."""
    i_n, o_y, width = tl.program_id(0), 0, N
    if w2 is not None and not PAIR: # y is (W x, W2 x)
        width = N + N2
        if i_n >= tl.cdiv(N, BN):
            i_n, o_y, w, scale, N = i_n - tl.cdiv(N, BN), N, w2, scale2, N2
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    o_b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    m_n, m_b = o_n < N, o_b < B
    out, mask = o_b[None, :] * width + o_y + o_n[:, None], m_b[None, :] & m_n[:, None]
    after_the_last_kernel()
    # what is used after the loop is asked for before it
    if squares is not None:
        o_t = tl.arange(0, BT)[None, :]
        b_sq = tl.load(squares + o_b[:, None] * TILES + o_t, mask=m_b[:, None] & (o_t < TILES), other=0.0)
    if scale is not None:
        b_scale = tl.load(scale + o_n, mask=m_n, other=0.0)
    if PAIR and scale2 is not None:
        b_scale2 = tl.load(scale2 + o_n, mask=m_n, other=0.0)
    if residual is not None:
        b_residual = tl.load(residual + out, mask=mask, other=0.0)

    # W x^T: (BN, BK) x (BK, BB), or G times (BN, BK/G) x (BK/G, BB)
    if G > 1:
        o_k = tl.arange(0, G)[:, None] * (BK // G) + tl.arange(0, BK // G)[None, :]
        n_w, k_w, n_x, k_x = o_n[None, :, None], o_k[:, None, :], o_b[None, None, :], o_k[:, :, None]
        b_y, b_y2 = tl.zeros([G, BN, BB], tl.float32), tl.zeros([G, BN, BB], tl.float32)
    else:
        o_k = tl.arange(0, BK)
        n_w, k_w, n_x, k_x = o_n[:, None], o_k[None, :], o_b[None, :], o_k[:, None]
        b_y, b_y2 = tl.zeros([BN, BB], tl.float32), tl.zeros([BN, BB], tl.float32)
    o_w, o_x = n_w * K + k_w, n_x * K + k_x
    for i_k in range(0, K, BK):
        m_w, m_x = n_w < N, n_x < B
        if K % BK > 0:
            m_w, m_x = m_w & (i_k + k_w < K), m_x & (i_k + k_x < K)
        b_x = tl.load(x + o_x + i_k, mask=m_x, other=0.0)
        b_w = tl.load(w + o_w + i_k, mask=m_w, other=0)
        b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y, input_precision="ieee")
        if PAIR:
            b_w2 = tl.load(w2 + o_w + i_k, mask=m_w, other=0)
            b_y2 = tl.dot(b_w2.to(b_x.dtype), b_x, b_y2, input_precision="ieee")
    if G > 1:
        b_y, b_y2 = tl.sum(b_y, 0), tl.sum(b_y2, 0)
    if scale is not None:
        b_y *= b_scale[:, None]
    if PAIR and scale2 is not None:
        b_y2 *= b_scale2[:, None]
    if squares is not None:
        b_r = tl.rsqrt(tl.sum(b_sq, 1) / K + eps)[None, :]
        b_y, b_y2 = b_y * b_r, b_y2 * b_r
    if PAIR:
        b_y *= tl.sigmoid(b_y) * b_y2
    if residual is not None:
        b_y += b_residual.to(tl.float32)
    b_y = b_y.to(y.dtype.element_ty)
    tl.store(y + out, b_y, mask=mask)
    b_f = b_y.to(tl.float32) # as rounded; rows and columns beyond the end are zero
    tl.store(squares_y + o_b * tl.num_programs(0) + tl.program_id(0), tl.sum(b_f * b_f, 0), mask=m_b)

@triton.jit
def step_inputs_kernel(p, past, taps, low, bias, x, squares, ab, A_log, dt_bias, q, k, v, g, beta, eps, P, C, TILES,
                       SIZE: tl.constexpr, UNIT: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                       RANK: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """A step's arguments from p (B, P): convolution, whose past moves on by a token, and gates. Grid (B, 4 H)."""
    i_b, i_h, which = tl.program_id(0).to(tl.int64), tl.program_id(1) % H, tl.program_id(1) // H
    i, o = i_b * H + i_h, tl.arange(0, BD)
    p += i_b * P
    after_the_last_kernel()
    if which == 3:
        if RANK > 0: # GLA: log sigmoid(z) / 16 per channel, z = low p_low + bias
            m, o_r = o < K, tl.arange(0, RANK)[None, :]
            b_low = tl.load(p + H * (K + K + V) + o_r).to(tl.float32)
            b_w = tl.load(low + (i_h * K + o[:, None]) * RANK + o_r, mask=m[:, None], other=0.0).to(tl.float32)
            b_z = tl.load(bias + i_h * K + o, mask=m, other=0.0).to(tl.float32) + tl.sum(b_w * b_low, 1)
            b_g = (tl.minimum(b_z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_z)))) / GATE_NORMALIZER
            tl.store(g + i * K + o, b_g, mask=m)
        else: # GDN: -e^{A_log} softplus(a + dt_bias) and sigmoid(b) per head; a, b = W_ab n(x) by (2)
            o_c, o_t = tl.arange(0, BC), tl.arange(0, BT)
            b_x = tl.load(x + i_b * C + o_c, mask=o_c < C, other=0.0).to(tl.float32)
            b_wa = tl.load(ab + i_h * C + o_c, mask=o_c < C, other=0.0).to(tl.float32)
            b_wb = tl.load(ab + (H + i_h) * C + o_c, mask=o_c < C, other=0.0).to(tl.float32)
            b_sq = tl.load(squares + i_b * TILES + o_t, mask=o_t < TILES, other=0.0)
            b_A, b_dt = tl.load(A_log + i_h), tl.load(dt_bias + i_h)
            b_r = tl.rsqrt(tl.sum(b_sq, 0) / C + eps)
            b_a, b_b = tl.sum(b_wa * b_x, 0) * b_r + b_dt, tl.sum(b_wb * b_x, 0) * b_r
            softplus = tl.maximum(b_a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_a)))
            tl.store(g + i, -tl.exp(b_A) * softplus)
            tl.store(beta + i, tl.sigmoid(b_b))
    else:
        width = tl.where(which == 2, V, K)
        o_p, m = which * H * K + i_h * width + o, o < width # q of all heads, then k, then v
        b = tl.load(p + o_p, mask=m, other=0.0).to(tl.float32)
        if SIZE > 0:
            D: tl.constexpr = H * (K + K + V)
            row, tokens = past + i_b * (SIZE - 1) * D + o_p, ()
            b_y = b * tl.load(taps + o_p * SIZE + SIZE - 1, mask=m, other=0.0)
            for s in tl.static_range(SIZE - 1): # from the oldest token on; all are read before one is written
                tokens = tokens + (tl.load(row + s * D, mask=m, other=0.0),)
                b_y += tokens[s] * tl.load(taps + o_p * SIZE + s, mask=m, other=0.0)
            tokens = tokens + (b,)
            for s in tl.static_range(SIZE - 1):
                tl.store(row + s * D, tokens[s + 1], mask=m)
            b = b_y
        if SIZE > 0 or UNIT: # Gated DeltaNet has the convolution's SiLU without it too
            b *= tl.sigmoid(b)
        if which == 2:
            tl.store(v + i * V + o, b.to(v.dtype.element_ty), mask=m)
        else:
            if UNIT:
                b *= tl.rsqrt(tl.sum(b * b, 0) + 1e-6)
            tl.store(tl.where(which == 0, q, k) + i * K + o, b.to(q.dtype.element_ty), mask=m)

def rms_norm(x, weight, eps, gate=None):
    """
    x / rms(x) * weight, times silu(gate), as model.py's RMSNorm: x (..., D), weight (D,) fp32. gate: as x (..., H, D),
    or columns of a wider product's output. No gradient.
    """
    x, D, H, stride = x.contiguous(), x.shape[-1], 1, 0
    if gate is not None:
        H, gate = gate.shape[-2], gate.flatten(0, -3)
        gate = gate if gate.stride()[1:] == (D, 1) else gate.contiguous()
        stride = gate.stride(0)
    y, N, BD = torch.empty_like(x), x.numel() // D, triton.next_power_of_2(D)
    ROWS = max(1, 1024 // BD)
    with torch.cuda.device_of(x):
        rms_norm_kernel[(cdiv(N, ROWS),)](x, weight, gate, y, eps, N, stride, D, H=H, ROWS=ROWS, BD=BD, num_warps=4,
                                          launch_pdl=has_tma(x.device))
    return y

def linear_step_tiles(B, N, device):
    """
    BB, BN, bytes of a row in a block of columns, stages, G, for products of B sequences with N rows. Each program reads
    its rows of W and of x but once, all at a time where shared memory allows. Few sequences: few rows of W a program,
    which make many programs, 64 of a model's 1,024 for the 132 multiprocessors of an H200. More: 64 rows for wgmma, and
    the sequences in as many parts as leave one program a multiprocessor.
    """
    if B <= 16:
        return (16, 32, 512, 3 if small(device) else 5, 4) if N >= 8192 else (16, 16, 512, 5, 4)
    if N >= 8192: # two programs a multiprocessor, one after the other
        return 64, 64, 128, 3 if small(device) else 5, 1
    BB = 64
    while BB > 16 and (BB // 2 >= B or cdiv(N, 64) * cdiv(B, BB // 2) <= multiprocessors(device)):
        BB //= 2
    return BB, 64, 256, 3 if small(device) else 6 if BB == 16 else 4, 1

def linear_step(x, linear, norm=None, pair=None, beside=None, residual=None):
    """
    A product of (1): W n(x) + residual, or silu(W n(x)) (W2 n(x)) where `pair` has W2, or W n(x) and W2 n(x) side by
    side where `beside` has it. x (B, K), bf16 or fp32. linear, pair and beside hold `weight` (N, K) in x's dtype, or
    `q` (N, K) int8 and `scale` (N,) fp32. norm: x's sums of squares (B, any number), fp32, and eps; None: n(x) = x.
    residual (B, N). Returns y (B, N) in x's dtype and its sums of squares. No gradient.
    """
    def matrix(m):
        return (m.q, m.scale) if hasattr(m, "q") else (None if m is None else m.weight, None)
    other = beside if pair is None else pair
    (B, K), (w, scale), (w2, scale2), (squares, eps) = x.shape, matrix(linear), matrix(other), norm or (None, 0.0)
    N, N2, TILES = len(w), 0 if beside is None else len(w2), 1 if norm is None else squares.shape[1]
    assert w.shape[1] == K and (w2 is None or w2.shape[1] == K), f"W has {w.shape[1]} columns and x {K}"
    BB, BN, row, stages, G = linear_step_tiles(B, N + N2, x.device)
    grid = cdiv(N, BN) + cdiv(N2, BN), cdiv(B, BB)
    y, squares_y = x.new_empty(B, N + N2), x.new_empty(B, grid[0], dtype=torch.float32)
    with torch.cuda.device_of(x):
        linear_step_kernel[grid](
            x, w, scale, w2, scale2, squares, residual, y, squares_y, eps, B, N, N2, TILES, K=K, PAIR=pair is not None,
            BT=triton.next_power_of_2(TILES), BB=BB, BN=BN, BK=row // x.element_size(), G=G, num_warps=4,
            num_stages=stages, launch_pdl=has_tma(x.device))
    return y, squares_y

def step_inputs(p, H, K, V, unit, conv=(None, None), low=(None, None), gates=(None, (None, 0.0), None, None, None)):
    """
    A step's arguments, contiguous, from the first H (K + K + V) + rank of a token's projections p (B, P): q, k (B, H,
    K), v (B, H, V) in p's dtype, after the short convolution conv = (past (B, size - 1, H (K + K + V)), taps (H (K + K
    + V), size)) in fp32, whose past is updated in place; with `unit` q and k of unit length, and SiLU without a
    convolution too. With them in fp32: g (B, H, K) of GLA by low = (weight (H K, rank), bias (H K,)), or g, beta (B, H)
    of GDN by gates = (x (B, C), its norm as in linear_step, weight (2 H, C), A_log, dt_bias (H,)). No gradient.
    """
    (past, taps), (x, (squares, eps), *decay), B = conv, gates, len(p)
    rank, C, TILES = (low[0].shape[1], 1, 1) if x is None else (0, x.shape[1], squares.shape[1])
    q, k, v = (p.new_empty(B, H, D) for D in (K, K, V))
    g = [p.new_empty(size, dtype=torch.float32) for size in ([(B, H, K)] if rank else [(B, H), (B, H)])]
    with torch.cuda.device_of(p):
        step_inputs_kernel[(B, 4 * H)](
            p, past, taps, *low, x, squares, *decay, q, k, v, g[0], g[-1], eps, p.shape[1], C, TILES,
            SIZE=0 if taps is None else taps.shape[1], UNIT=unit, H=H, K=K, V=V, RANK=rank,
            BC=triton.next_power_of_2(C), BT=triton.next_power_of_2(TILES), BD=triton.next_power_of_2(max(K, V)),
            num_warps=4, launch_pdl=has_tma(p.device))
    return q, k, v, *g
