"""
kernels.py against a time loop in fp64 and against model.py's chunked forms in fp64, themselves held to the loop.

    pytest test_kernels.py      # CPU: Triton's interpreter, fp32, small shapes; GPU: also bf16 at the real shapes
"""
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1" # before triton is imported

import pytest
import torch.nn.functional as F

# ----------------------------------------------------------------------------------------------------------------------
# references: equation (1) of each mixer, one token at a time, in the dtype of its inputs

def gla_loop(q, k, v, g, scale=None, initial_state=None, segment_ids=None):
    """S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t; S is set to 0 where the segment changes."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    scale, o = K**-0.5 if scale is None else scale, []
    for t in range(T):
        if segment_ids is not None and t > 0:
            S = S * (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None]
        S = S * g[:, t].exp()[..., None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1), S

def gated_delta_rule_loop(q, k, v, g, beta, scale=None, initial_state=None, segment_ids=None):
    """S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T, o_t = scale S_t^T q_t."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    scale, o = K**-0.5 if scale is None else scale, []
    for t in range(T):
        if segment_ids is not None and t > 0:
            S = S * (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None]
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1), S

# ----------------------------------------------------------------------------------------------------------------------
# the error measure

def norms(x, chunk):
    """L2 norms in fp64 of x (B, T, H, ...) over each (batch, chunk of tokens, head): (B, NT, H)."""
    x = x.detach().double().reshape(*x.shape[:3], -1)
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(1, (-1, chunk)).square().sum((2, 4)).sqrt()

def errors(x, ref, chunk=64, floor=None):
    """
    (worst head, worst chunk): the largest relative L2 error of x over a (batch, head) and over a (batch, chunk, head).
    Both over the reference's norm there, at least 1e-3 of the tensor's mean block norm and at least `floor` (B, NT, H).
    Fails on another shape and on anything that is not finite.
    """
    assert x.shape == ref.shape and torch.isfinite(x).all(), (x.shape, ref.shape, torch.isfinite(x).all())
    difference, size = norms(x.double() - ref.double(), chunk), norms(ref, chunk)
    size = torch.maximum(size, (1e-3 * size.mean()).clamp(min=1e-300)) # a block of zeros is not divided by zero
    if floor is not None:
        size = torch.maximum(size, floor)
    head = difference.square().sum(1).sqrt() / size.square().sum(1).sqrt()
    return head.max().item(), (difference / size).max().item()

def state_error(x, ref):
    """The largest relative L2 error of a state (B, H, K, V) over a (batch, head)."""
    return errors(x[:, None].flatten(3), ref[:, None].flatten(3), chunk=1)[1]

# ----------------------------------------------------------------------------------------------------------------------
# Gated Linear Attention

# ----------------------------------------------------------------------------------------------------------------------
# the gated delta rule

# ----------------------------------------------------------------------------------------------------------------------
# the output head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

def relative(x, ref):
    return ((x.double() - ref.double()).norm() / ref.double().norm()).item()

# rounding dz to bf16 leaves 2e-3 in the gradients; fp32 at the same shapes 1e-6 (tf32 on a GPU: allowed 1e-3)
@pytest.mark.parametrize("dtype, vocab, loss_tol, grad_tol", [(torch.float32, 5000, 1e-5, 1e-5)]
    + [(torch.bfloat16, 50_304, 2e-3, 4e-3)] * torch.cuda.is_available())
def test_linear_cross_entropy(dtype, vocab, loss_tol, grad_tol, monkeypatch):
    import kernels
    monkeypatch.setattr(kernels, "CE_ROWS", 16) # several chunks, the last one short
    torch.manual_seed(0)
    x = torch.randn(3, 13, 64, device=DEVICE).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocab, 64, device=DEVICE)).requires_grad_()
    targets = torch.randint(0, vocab, (3, 13), device=DEVICE)
    targets[0, 0], targets[0, 1] = 0, vocab - 1
    loss = kernels.linear_cross_entropy(x, weight, targets)
    (3 * loss).backward() # gradients scale with what arrives from above
    X, W = x.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    ref = F.cross_entropy((X @ W.T).flatten(0, 1), targets.flatten())
    (3 * ref).backward()
    assert abs(loss.item() - ref.item()) <= loss_tol * ref.item()
    assert relative(x.grad, X.grad) <= grad_tol and relative(weight.grad, W.grad) <= grad_tol
    assert x.grad.dtype == dtype and weight.grad.dtype == torch.float32
    with torch.no_grad(): # evaluation makes no gradients and gives the same bits
        assert kernels.linear_cross_entropy(x, weight, targets).item() == loss.item()
    x = x.detach()
    x[1, 2] = float("nan")
    assert torch.isnan(kernels.linear_cross_entropy(x, weight, targets)) # one bad token is not lost

def test_linear_cross_entropy_opcheck():
    import kernels
    x, weight = torch.randn(20, 16, device=DEVICE, requires_grad=True), torch.randn(100, 16, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, 100, (20,), device=DEVICE)
    torch.library.opcheck(kernels.linear_cross_entropy_op, (x, weight, targets, True))

# ----------------------------------------------------------------------------------------------------------------------
# model.py
