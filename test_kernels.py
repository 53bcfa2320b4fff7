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

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

def relative(x, ref):
    return ((x.double() - ref.double()).norm() / ref.double().norm()).item()

# ----------------------------------------------------------------------------------------------------------------------
# Gated Linear Attention

# ----------------------------------------------------------------------------------------------------------------------
# the gated delta rule

# ----------------------------------------------------------------------------------------------------------------------
# the short convolution

def short_conv_loop(x, weight, H, K, V, unit, segment_ids=None):
    """Equation (1) of the convolution, one token at a time, in x's dtype."""
    B, T, D = x.shape
    size, y = weight.shape[1], []
    for t in range(T):
        p = x.new_zeros(B, D)
        for s in range(min(size, t + 1)):
            same = 1 if segment_ids is None else (segment_ids[:, t - s] == segment_ids[:, t])[:, None]
            p = p + weight[:, size - 1 - s] * x[:, t - s] * same
        y.append(p * p.sigmoid())
    q, k, v = (z.unflatten(-1, (H, -1)) for z in torch.stack(y, 1).split([H * K, H * K, H * V], -1))
    if unit:
        q, k = (z * torch.rsqrt(z.square().sum(-1, keepdim=True) + 1e-6) for z in (q, k))
    return q, k, v

CONV_SHAPES = [(2, 130, 3, 16, 40, 4, True, True), (1, 1, 1, 5, 7, 4, True, True), (3, 67, 2, 16, 64, 2, True, False),
               (1, 64, 1, 8, 150, 3, False, True), (1, 4, 2, 16, 16, 1, True, True)] # B, T, H, K, V, size, unit, segments

# fp32 sums in another order: 1e-6; bf16 rounds what is returned (2e-3), and the gradient of a norm adds to it
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-6)] + [(torch.bfloat16, 6e-3)] * torch.cuda.is_available())
@pytest.mark.parametrize("B, T, H, K, V, size, unit, segments",
                         CONV_SHAPES + [(2, 2049, 6, 128, 256, 4, True, True)] * torch.cuda.is_available())
def test_short_conv(dtype, tol, B, T, H, K, V, size, unit, segments):
    import kernels
    torch.manual_seed(0)
    x = torch.randn(B, T, H * (2 * K + V), device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(x.shape[-1], size, device=DEVICE, requires_grad=True)
    ids = (torch.rand(B, T, device=DEVICE) < 0.2).cumsum(1).int() if segments else None
    out = kernels.short_conv(x, weight, H, K, V, unit, ids)
    X, W = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    ref = short_conv_loop(X, W, H, K, V, unit, ids)
    do = [torch.randn_like(y).transpose(1, 2).contiguous().transpose(1, 2) for y in out] # not contiguous
    torch.autograd.backward(out, do)
    torch.autograd.backward(ref, [d.double() for d in do])
    for y, r in zip((*out, x.grad, weight.grad), (*ref, X.grad, W.grad)):
        assert torch.isfinite(y).all() and relative(y, r) <= tol

def test_short_conv_refuses_and_repeats():
    import kernels
    x, weight = torch.randn(1, 9, 24, device=DEVICE, requires_grad=True), torch.randn(24, 4, device=DEVICE, requires_grad=True)
    with pytest.raises(AssertionError, match="conv_size must be at most 4"):
        kernels.short_conv(x, torch.randn(24, 5, device=DEVICE), 1, 8, 8, True)
    torch.library.opcheck(kernels.short_conv_op, (x, weight, None, 1, 8, 8, True))
    first, second = (torch.autograd.grad(kernels.short_conv(x, weight, 1, 8, 8, True), (x, weight),
                                         [torch.ones(1, 9, 1, 8, device=DEVICE)] * 3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))

# ----------------------------------------------------------------------------------------------------------------------
# the output head

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
