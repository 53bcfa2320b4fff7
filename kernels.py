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
    return F.pad(x, (0, size - x.shape[-1])).contiguous()

def tiles(x, rows, cols):
    """Descriptor of `rows` x `cols` tiles of x (B, T, H, D), indexed [b, t, h * D + d]; the bound cuts a ragged T."""
    B, T, H, D = x.shape
    return TensorDescriptor(x, [B, T, H * D], [T * H * D, H * D, 1], [1, rows, cols])

# ----------------------------------------------------------------------------------------------------------------------
# Gated Linear Attention

# ----------------------------------------------------------------------------------------------------------------------
# the gated delta rule

# ----------------------------------------------------------------------------------------------------------------------
# the output head: linear + cross-entropy
#
# With the logits z = W x of a token and p = softmax(z),
#   loss = log sum_c e^{z_c} - z_target,   dloss/dz = p - onehot(target).                                      (1)
# One chunk of tokens has its logits in memory at a time; they become dz = (p - onehot) / N in place, and from it
#   dx = dz W,   dW = dz^T x, summed over the chunks in fp32.                                                  (2)
# So the gradients are made in the forward pass, where the logits are; backward scales them by the loss's own gradient.

CE_ROWS = 4096 # tokens a chunk: 412 MB of bf16 logits at 50,304 columns, matrix products large enough for full speed

@triton.jit
def cross_entropy_kernel(logits, targets, losses, weight, n_cols, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """Eq. (1) of one token: its loss and, with GRAD, weight * (p - onehot) in place of its logits. Grid (tokens,)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * n_cols
    target = tl.load(targets + row)
    z_target = tl.load(logits + target).to(tl.float32)
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
    tl.store(losses + row, log2_sum / LOG2E - z_target)
    if GRAD:
        for c in range(0, n_cols, BLOCK):
            b_z = tl.load(logits + c + o_c, mask=c + o_c < n_cols, other=-float("inf")).to(tl.float32) * LOG2E
            b_dz = (tl.exp2(b_z - log2_sum) - tl.where(c + o_c == target, 1.0, 0.0)) * weight
            tl.store(logits + c + o_c, b_dz.to(logits.dtype.element_ty), mask=c + o_c < n_cols)

@torch.library.custom_op("kernels::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(x: Tensor, weight: Tensor, targets: Tensor, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, C), weight (vocab, C), targets (N,) -> mean loss, dx like x and dW in fp32 (both empty without grad)."""
    N, vocab = x.shape[0], weight.shape[0]
    W = weight.to(x.dtype)
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if grad else x.new_empty(0)
    dW = torch.zeros_like(weight, dtype=torch.float32) if grad else x.new_empty(0, dtype=torch.float32)
    with torch.cuda.device_of(x):
        for n in range(0, N, CE_ROWS):
            rows = slice(n, min(n + CE_ROWS, N))
            logits = x[rows] @ W.T
            cross_entropy_kernel[(logits.shape[0],)](logits, targets[rows], losses[rows], 1 / N, vocab, GRAD=grad,
                                                     BLOCK=4096, num_warps=8)
            if grad:
                torch.mm(logits, W, out=dx[rows])
                if x.dtype == torch.float32:
                    dW.addmm_(logits.T, x[rows])
                else:
                    torch.addmm(dW, logits.T, x[rows], out_dtype=torch.float32, out=dW)
    return losses.mean(), dx, dW

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
    x (..., C) bf16 or fp32, weight (vocab, C), targets (...) integers in [0, vocab). The softmax and the sum that makes
    weight's gradient are in fp32.
    """
    return linear_cross_entropy_op(x.flatten(0, -2), weight, targets.flatten(), torch.is_grad_enabled())[0]
