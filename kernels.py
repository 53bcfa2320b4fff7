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
