"""
Fused Triton kernels for Gated Linear Attention and the gated delta rule, forward, backward and one-token step.

    gla(q, k, v, g, scale=None, initial_state=None, segment_ids=None)                    -> o, final_state
    gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, segment_ids=None) -> o, final_state
    gla_step(q, k, v, g, state, scale=None)                                              -> o, state in place
    gated_delta_rule_step(q, k, v, g, beta, state, scale=None)                           -> o, state in place

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

LOG2E = 1.4426950408889634 # kernels use exp2 only: log gates are multiplied by log2(e) where they are first summed
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
