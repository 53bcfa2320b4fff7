"""
kernels.py against a time loop in fp64 and against model.py's chunked forms in fp64, themselves held to the loop.

    pytest test_kernels.py      # CPU: Triton's interpreter, fp32, small shapes; GPU: also bf16 at the real shapes
"""
import functools
import importlib
import math
import os
from types import SimpleNamespace

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1" # before triton is imported

import pytest
import torch.nn.functional as F

import kernels

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

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
DTYPES = [torch.bfloat16, torch.float32] if GPU else [torch.float32] # the interpreter's bf16 dots are wrong

@pytest.fixture(autouse=GPU)
def free_memory():
    """Gives back what a test took: a time loop in fp64 keeps 10 GB, and several processes may share the GPU."""
    yield
    torch.cuda.empty_cache()

def relative(x, ref):
    return ((x.double() - ref.double()).norm() / ref.double().norm()).item()

# ----------------------------------------------------------------------------------------------------------------------
# Gated Linear Attention

# (worst head, worst chunk) of o, dq, dk, dv; of dg with typical gates; of dg with stronger ones; states
GLA_TOL = { # measured: bf16 4e-3, 5e-3, 1.4e-2, 2e-3 (H200); fp32 4e-7, 6e-7, 3e-6, 3e-7 (interpreter)
    torch.bfloat16: ((6e-3, 2e-2), 1e-2, 2.5e-2, 5e-3),
    torch.float32: ((1e-3, 1e-3), 2e-3, 2e-3, 1e-3),
}

def typical(*shape):
    return F.logsigmoid(torch.randn(shape)) / 16

GATES = { # log decay a token; the last of HEADS heads stays typical, so that strong and other chunks meet
    "typical": typical,
    **{str(x): lambda *shape, x=x: torch.full(shape, float(x)) for x in (0, -1, -5, -20, -50, -100)},
    "one channel": lambda B, T, H, K: torch.where(torch.arange(K) == K // 2, -50.0, typical(B, T, H, K)),
    "one token": lambda B, T, H, K: torch.where(torch.arange(T)[:, None, None] == T // 2, -100.0, typical(B, T, H, K)),
    "alternating": lambda B, T, H, K:
        torch.where(torch.arange(T) % 2 == 0, -100.0, 0.0)[:, None, None].repeat(B, 1, H, K),
    "resets": lambda B, T, H, K: torch.where(torch.arange(T)[:, None, None] % 7 == 4, -math.inf, typical(B, T, H, K)),
    "random": lambda *shape: -50 * torch.rand(shape),
    "half": lambda *shape: torch.where(torch.rand(shape) < 0.5, -50.0, 0.0),
}

def gla_inputs(B, T, H, K, V, gate="typical", dtype=torch.float32, g_dtype=torch.float32, state=True, seed=0):
    """q, k, v, g, initial_state and the gradients of o and of the final state."""
    torch.manual_seed(seed)
    g = GATES[gate](B, T, H, K)
    if gate != "typical":
        g[:, :, HEADS - 1::HEADS] = typical(B, T, H, K)[:, :, HEADS - 1::HEADS]
    q, k, v, do = (torch.randn(B, T, H, D) for D in (K, K, V, V))
    S0, dS = torch.randn(B, H, K, V), torch.randn(B, H, K, V)
    q, k, v, do = (x.to(DEVICE, dtype) for x in (q, k, v, do))
    return q, k, v, g.to(DEVICE, g_dtype), S0.to(DEVICE) if state else None, do, dS.to(DEVICE)

def gla_grads(f, q, k, v, g, S0, do, dS, segment_ids=None, scale=None):
    """o, final state and the gradients of q, k, v, g and S0 by autograd through f."""
    x = [None if t is None else t.detach().clone().requires_grad_() for t in (q, k, v, g, S0)]
    o, S = f(*x[:4], scale, x[4], segment_ids)
    loss = [(y, dy) for y, dy in ((o, do), (S, dS)) if dy is not None]
    torch.autograd.backward([y for y, _ in loss], [dy.to(y.dtype) for y, dy in loss])
    return o, S, *(None if t is None else t.grad for t in x)

def gla_check(inputs, segment_ids=None, typical_gates=True, tag="", scale=None):
    from kernels import gla
    out = gla_grads(gla, *inputs, segment_ids, scale)
    reference = gla_loop if inputs[0].shape[1] <= 4096 else gla_chunked
    ref = gla_grads(reference, *(None if t is None else t.double() for t in inputs), segment_ids, scale)
    tol, tol_dg, tol_strong, tol_state = GLA_TOL[inputs[0].dtype]
    for name, x, y in zip(("o", "dq", "dk", "dv"), (out[0], *out[2:5]), (ref[0], *ref[2:5])):
        head, chunk = errors(x, y)
        assert head <= tol[0] and chunk <= tol[1], f"{tag} {name}: {head:.1e} a head, {chunk:.1e} a chunk"
    # a true dg may be 1e-21: not below 1e-4 of its terms
    floor = 1e-4 * norms(inputs[0].double() * ref[2], 64)
    error = errors(out[5], ref[5], floor=floor)[1]
    assert error <= (tol_dg if typical_gates else tol_strong), f"{tag} dg: {error:.1e}"
    for name, x, y in (("final state", out[1], ref[1]), ("dS0", out[6], ref[6])):
        if y is not None and y.norm() > 1e-30: # below that fp32 has no digits
            assert (error := state_error(x, y)) <= tol_state, f"{tag} {name}: {error:.1e}"
        assert y is None or torch.isfinite(x).all()

# on the CPU in fp32 through the interpreter; on a GPU the same in bf16 at wider heads, and in fp32
WIDE = (128, 256) if GPU else (16, 32) # K, V
HEADS = 4 if GPU else 2 # one number for most tests: on a GPU each H is compiled anew

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 127, 200] + [2048, 2049] * GPU)
def test_gla_lengths(T, dtype):
    gla_check(gla_inputs(1, T, max(3, HEADS), *WIDE, dtype=dtype))

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
def test_gla_gates(gate, dtype):
    gla_check(gla_inputs(1, 130, HEADS, *WIDE, gate, dtype), typical_gates=gate == "typical")

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, V", [(1, 16), (100, 64), (64, 1), (128, 16), (16, 128)] + [(256, 256), (128, 128)] * GPU)
def test_gla_widths(K, V, dtype):
    H = 3 if GPU else 2
    gla_check(gla_inputs(1, 66, H, K, V, dtype=dtype))
    gla_check(gla_inputs(1, 66, H, K, V, "-5", dtype), typical_gates=False)

SEGMENTS = [ # lengths of the documents in each row
    [[63, 1, 1, 63, 2, 1, 1, 1, 67], [64, 65, 71]],
    [[1] * 70 + [130], [130, 3, 67]],
]
def segment_rows(rows):
    return torch.stack([torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in rows]).int().to(DEVICE)

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["typical", "-5", "half"])
@pytest.mark.parametrize("rows", SEGMENTS)
def test_gla_segments(rows, gate, dtype):
    gla_check(gla_inputs(2, 200, HEADS, *WIDE, gate, dtype), segment_rows(rows), typical_gates=gate == "typical")

def test_gla_documents_are_separate():
    from kernels import gla
    seg = segment_rows(SEGMENTS[0])
    a = gla_inputs(2, 200, HEADS, *WIDE, dtype=DTYPES[0])
    other = gla_inputs(2, 200, HEADS, *WIDE, dtype=DTYPES[0], seed=1)
    inside = (seg % 2 == 0)[:, :, None, None] # every second document gets other tokens, gates and output gradients
    b = [torch.where(inside, y, x) if x.dim() == 4 and x.shape[1] == 200 else x for x, y in zip(a, other)]
    for name, x, y in zip(("o", "", "dq", "dk", "dv", "dg"), gla_grads(gla, *a, seg), gla_grads(gla, *b, seg)):
        if name:
            assert torch.equal(x[~inside[..., 0, 0]], y[~inside[..., 0, 0]]), name

@pytest.mark.parametrize("gate", ["typical", "-5"])
def test_gla_parts(gate, monkeypatch):
    """A long sequence is swept in parts side by side; here of two chunks each."""
    monkeypatch.setattr(kernels, "gla_parts", lambda programs, NT, device: (-(-NT // 2), 2))
    gla_check(gla_inputs(1, 270, HEADS, *WIDE, gate, DTYPES[0]), typical_gates=gate == "typical")
    rows = [[100, 5, 165]]
    gla_check(gla_inputs(1, 270, HEADS, *WIDE, gate, DTYPES[0]), segment_rows(rows), typical_gates=gate == "typical")

@pytest.mark.parametrize("gate", ["typical", "-5"])
def test_gla_scale_no_initial_state_and_unaligned(gate):
    inputs = gla_inputs(1, 70, HEADS, *WIDE, gate, DTYPES[0], state=False)
    odd = [None if x is None else torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in inputs]
    assert odd[2].data_ptr() % 16 != 0 and odd[2].is_contiguous()
    for x in (inputs, odd):
        gla_check(x, typical_gates=gate == "typical", scale=-0.7)

@pytest.mark.parametrize("gate", ["typical", "-5"])
def test_gla_gates_in_bf16(gate):
    """The same as with these gates in fp32; dg is rounded, in the interpreter cut off, at the eighth bit."""
    from kernels import gla
    q, k, v, g, *rest = gla_inputs(1, 70, HEADS, *WIDE, gate, DTYPES[0], g_dtype=torch.bfloat16)
    wide, narrow = gla_grads(gla, q, k, v, g.float(), *rest), gla_grads(gla, q, k, v, g, *rest)
    for i, (x, y) in enumerate(zip(narrow, wide)):
        if i == 5:
            assert x.dtype == torch.bfloat16 and ((x - y).abs() <= 2**-7 * y.abs() + 1e-3 * y.abs().mean()).all()
        else:
            assert relative(x, y) <= 1e-3

@pytest.mark.parametrize("g_dtype", DTYPES[:1] + [torch.float32] * GPU)
@pytest.mark.parametrize("spread", [1, 100])
def test_gla_gates_as_logits(spread, g_dtype):
    """Log decay logsigmoid(x) / 16 made inside, and its gradient; x beyond 100 either way."""
    from kernels import gla
    q, k, v, _, *rest = gla_inputs(2, 70, HEADS, *WIDE, dtype=DTYPES[0])
    x = (spread * torch.randn(q.shape)).to(DEVICE, g_dtype)
    def of_logits(f):
        return lambda q, k, v, x, *args: f(q, k, v, F.logsigmoid(x) / 16, *args)
    out = gla_grads(functools.partial(gla, logits=True), q, k, v, x, *rest)
    ref = gla_grads(of_logits(gla_loop), *(t.double() for t in (q, k, v, x, *rest)))
    tol, tol_dg, tol_strong, tol_state = GLA_TOL[q.dtype]
    for i in (0, 2, 3, 4):
        assert errors(out[i], ref[i])[1] <= tol[1]
    error = errors(out[5], ref[5], floor=1e-4 * norms(q.double() * ref[2], 64))[1]
    assert error <= (tol_dg if spread == 1 else tol_strong) and state_error(out[1], ref[1]) <= tol_state

def test_launch_finds_the_kernel_of_its_arguments(monkeypatch):
    """One search for each type, alignment, constant and option; none for a length that no kernel is compiled for."""
    from kernels import launch
    searches, runs = [], []
    class Kernel:
        params = [SimpleNamespace(do_not_specialize=name == "T") for name in ("x", "y", "T", "K")]
        def __getitem__(self, grid):
            def search(*args, **options):
                searches.append((args, options))
                return {(*grid, 1): lambda *args: runs.append(args)}
            return search
    monkeypatch.setattr(kernels, "INTERPRET", False)
    monkeypatch.setattr(kernels, "COMPILED", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "has_tma", lambda device: True)
    kernel, x = Kernel(), torch.zeros(8)
    calls = [(x, None, 5, 64), (x, x, 5, 64), (x.bfloat16(), None, 5, 64), (x[1:], None, 5, 64), (x, None, 5, 128),
             (kernels.tiles(x.view(1, 1, 1, 8), 1, 8), None, 5, 64),
             (kernels.tiles(x.view(1, 1, 1, 8), 1, 4), None, 5, 64)]
    for args in calls:
        launch(kernel, (2, 3), dict(num_warps=4), *args)
    launch(kernel, (2, 3), dict(num_warps=8), *calls[0])
    assert len(searches) == len(calls) + 1 and not runs
    for args in calls:
        launch(kernel, (2, 3), dict(num_warps=4), *args[:2], 6, args[3])
    assert len(searches) == len(calls) + 1 and [args[2] for args in runs] == [6] * len(calls)

@gpu
@pytest.mark.parametrize("T", [43_884, 131_072])
def test_gla_long(T):
    """One sequence, in segments side by side; one chunk in the middle is strong."""
    gla_check(gla_inputs(1, T, 1, *WIDE, "one token", DTYPES[0]), typical_gates=False)

@gpu
@pytest.mark.parametrize("B, T, H, K, V", [(70_000, 3, 1, 32, 32), (9, 130_000, 8, 32, 256)])
def test_gla_beyond_the_grid_and_32_bits(B, T, H, K, V):
    """B * H above 65,535, and tensors above 2**31 elements: the last row against the same row alone."""
    row = gla_inputs(1, T, H, K, V, dtype=DTYPES[0])
    ref = gla_grads(kernels.gla, *row)
    out = gla_grads(kernels.gla, *(x.expand(B, *x.shape[1:]) for x in row))
    for name, x, y in zip(("o", "final state", "dq", "dk", "dv", "dg"), out, ref):
        assert relative(x[-1:], y) < 1e-2, name

def test_gla_only_the_final_state_feeds_the_loss():
    q, k, v, g, S0, do, dS = gla_inputs(1, 70, HEADS, *WIDE, dtype=DTYPES[0])
    from kernels import gla
    out = gla_grads(gla, q, k, v, g, S0, None, dS)
    ref = gla_grads(gla_loop, *(x.double() for x in (q, k, v, g, S0)), None, dS.double())
    assert out[2].abs().max() == 0
    for i in (3, 4, 5):
        assert errors(out[i], ref[i])[1] <= 2e-2

def test_gla_strides_repeats_and_poison():
    """Non-contiguous inputs and gradients, twice the same bits, and every output written: memory is filled with NaN."""
    from kernels import gla
    inputs = gla_inputs(2, 70, HEADS, *WIDE, dtype=DTYPES[0])
    odd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not odd[0].is_contiguous() and not odd[4].is_contiguous()
    a = gla_grads(gla, *inputs)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        b = gla_grads(gla, *odd)
    finally:
        torch.use_deterministic_algorithms(False)
    for x, y in zip(a, b):
        assert torch.isfinite(x).all() and torch.equal(x, y)

@pytest.mark.parametrize("gate", ["typical", "-5"])
def test_gla_reads_columns_of_one_product(gate):
    """q, k and v as slices of one tensor are read where they are, to the same bits; one token late they are copied."""
    from kernels import evenly, gla
    inputs = gla_inputs(2, 70, HEADS, *((128, 256) if GPU else (64, 64)), gate, DTYPES[0])
    ref = gla_grads(gla, *inputs)
    qkv = torch.cat([x.flatten(2) for x in inputs[:3]], -1).requires_grad_()
    split = [x.shape[2] * x.shape[3] for x in inputs[:3]]
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in qkv.split(split, -1))
    assert all(evenly(x) is x for x in (q, k, v)) and evenly(q[:, 1:]).is_contiguous()
    o, S = gla(q, k, v, inputs[3], None, inputs[4])
    torch.autograd.backward([o, S], inputs[5:])
    assert torch.equal(o, ref[0]) and torch.equal(S, ref[1])
    assert torch.equal(qkv.grad, torch.cat([x.flatten(2) for x in ref[2:5]], -1))

@pytest.mark.parametrize("view", ["one token, heads first", "one token, time first", "tokens that overlap"])
def test_gla_reads_views(view):
    """A dimension of size 1 may have any stride; gradients of tokens that overlap are laid out as any other."""
    from kernels import gla
    B, T = (1, 70) if view == "tokens that overlap" else (3, 1)
    q, k, v, g, S0, do, dS = gla_inputs(B, T, 2, 64, 64, dtype=DTYPES[0])
    def as_view(x):
        if T > 1:
            return x.flatten().as_strided(x.shape, (T * 16, 16, 64, 1))
        return x.view(B, 2, 1, 64).transpose(1, 2) if "heads" in view else x.view(1, B, 2, 64).transpose(0, 1)
    def copy(x):
        return as_view(x).clone(memory_format=torch.contiguous_format)
    copies, views = (lambda *x, f=f: gla(*map(f, x[:3]), *x[3:]) for f in (copy, as_view))
    outputs = zip(gla_grads(views, q, k, v, g, S0, do, dS), gla_grads(copies, q, k, v, g, S0, do, dS))
    for i, (x, y) in enumerate(outputs):
        # on a GPU autograd adds what overlaps in bf16 in any order
        assert torch.equal(x, y) or GPU and T > 1 and i in (2, 3, 4) and relative(x, y) <= 2e-2

@pytest.mark.parametrize("gate", ["typical", "-50"])
@pytest.mark.parametrize("K, V", [(16, 32), (100, 40)])
def test_gla_step(K, V, gate):
    """T steps equal one pass, and either memory layout of the state."""
    from kernels import gla, gla_step
    q, k, v, g, S0, _, _ = gla_inputs(2, 5, 3, K, V, gate, DTYPES[0])
    ref, S_ref = gla_loop(*(x.double() for x in (q, k, v, g)), None, S0.double())
    for state in (S0.clone(), S0.transpose(2, 3).contiguous().transpose(2, 3)):
        o = torch.stack([gla_step(q[:, t], k[:, t], v[:, t], g[:, t], state) for t in range(5)], 1)
        assert errors(o, ref)[1] <= GLA_TOL[q.dtype][0][0] and state_error(state, S_ref) <= 1e-5
    o, S = gla(q, k, v, g, None, S0)
    assert state_error(S, S_ref) <= GLA_TOL[q.dtype][3]

def test_gla_refuses():
    from kernels import gla, gla_step
    q, k, v, g, S0, _, _ = gla_inputs(1, 4, 2, 16, 32)
    wide = torch.zeros(1, 4, 2, 512, device=DEVICE)
    for message, args in (
        ("bfloat16 or", (q.half(), k.half(), v.half(), g)), ("bfloat16 or", (q.double(), k.double(), v.double(), g)),
        ("1 to 256", (wide, wide, v, wide)), ("g must have shape", (q, k, v, g[..., 0])),
        ("q and k", (q, k[:, :3], v, g)),
        ("g must be", (q, k, v, g.half())), ("state must have", (q, k, v, g, None, S0[:, :1])),
        ("state must be", (q, k, v, g, None, S0.half())),
        ("segment_ids must be", (q, k, v, g, None, None, torch.zeros(1, 4))),
    ):
        with pytest.raises(AssertionError, match=message):
            gla(*args)
    with pytest.raises(AssertionError, match="state must have"):
        gla_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], S0[:, :1])

def test_gla_ops():
    """torch.library's own checks, and one graph that gives what eager gives."""
    from kernels import gla, gla_fwd, gla_step_op
    q, k, v, g, S0, do, dS = gla_inputs(1, 65, 2, 64, 64) # the op itself takes padded widths
    x = [t.clone().requires_grad_() for t in (q, k, v, g)]
    seg = segment_rows([[30, 35]])
    torch.library.opcheck(gla_fwd, (*x, 0.25, S0.transpose(2, 3).contiguous().requires_grad_(), seg, False))
    torch.library.opcheck(gla_step_op, (*(t[:, 0].contiguous() for t in (q, k, v, g)), S0.clone(), 0.25))
    compiled = torch.compile(gla, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for a, b in zip(gla_grads(gla, q, k, v, g, S0, do, dS, seg), gla_grads(compiled, q, k, v, g, S0, do, dS, seg)):
        assert torch.equal(a, b)

# ----------------------------------------------------------------------------------------------------------------------
# the gated delta rule

# (worst head, worst chunk) of the error measure; see there
GDN_TOL = {
    torch.float32: dict(o=(1e-3, 1e-3), dq=(1e-3, 1e-3), dk=(1e-3, 1e-3), dv=(1e-3, 1e-3),
                        dg=(2e-3, 2e-3), dbeta=(2e-3, 2e-3), S=1e-3, dS0=1e-3),
    torch.bfloat16: dict(o=(6e-3, 2e-2), dq=(6e-3, 2e-2), dk=(6e-3, 2e-2), dv=(6e-3, 2e-2),
                         dg=(1e-2, 1e-2), dbeta=(1e-2, 1e-2), S=5e-3, dS0=6e-3),
}
# what bf16 states and dv leave of dg and dbeta, one number a token, where its terms cancel or a chunk has few tokens:
# over a norm of at least 0.3 of the mean block norm. Emulated for single tokens, 144 heads: up to 4e-2 and
# 3e-2. Tests that pass by these limits only are reported as expected failures
GDN_LIMIT = dict(dg=5e-2, dbeta=5e-2)
NAMES = ("q", "k", "v", "g", "beta", "S0")

def gdn_inputs(B, T, H, K, V, dtype, kind="init", seed=0):
    """Leaves q, k, v, g, beta, initial state; gates and step sizes as at initialisation unless `kind` says so."""
    torch.manual_seed(seed)
    rand, randn = (lambda *s: torch.rand(*s, device=DEVICE)), (lambda *s: torch.randn(*s, device=DEVICE))
    q, k, v = F.normalize(randn(B, T, H, K), dim=-1), F.normalize(randn(B, T, H, K), dim=-1), randn(B, T, H, V)
    dt = torch.exp(rand(H) * 4.6 - 6.9) # 1e-3 to 0.1
    g = -(rand(H) * 15 + 1) * F.softplus(randn(B, T, H) * 0.5 + torch.log(torch.expm1(dt)))
    beta = torch.sigmoid(randn(B, T, H))
    if kind == "like keys":
        k = F.normalize(randn(B, 1, H, K) + 0.03 * randn(B, T, H, K), dim=-1)
        beta, g = 1 - 0.02 * rand(B, T, H), g * 0.01
    elif kind.startswith("gate"):
        g = torch.full_like(g, float(kind.split()[1]))
    elif kind == "half the gates -50":
        g = -50 * (rand(B, T, H) < 0.5).float()
    elif kind == "resets":
        g = torch.where(rand(B, T, H) < 0.2, -math.inf, g)
    elif kind.startswith("beta"):
        beta, g = torch.full_like(beta, float(kind.split()[1])), g * 0.01 # weak: at 0 the initial state is all there is
    elif kind == "half the betas 0":
        beta = beta * (rand(B, T, H) < 0.5)
    x = [q.to(dtype), k.to(dtype), v.to(dtype), g, beta, 0.3 * randn(B, H, K, V)]
    return [t.requires_grad_() for t in x]

def gdn_run(f, x, segment_ids=None, do=None, dS=None, scale=None):
    """{o, S, dq, ...} of f at x; gradients of <o, do> + <S, dS>, either may be missing."""
    o, S = f(*x[:5], scale, x[5], segment_ids)
    loss = [(y, d.to(y.dtype)) for y, d in ((o, do), (S, dS)) if d is not None]
    outputs, directions = zip(*loss)
    grads = torch.autograd.grad(outputs, x, directions, allow_unused=True)
    return dict(o=o, S=S, **{"d" + n: d for n, d in zip(NAMES, grads)})

def gdn_compare(out, ref, x, tol):
    """Every tensor of `out` within tolerance of `ref`, and of the shape and dtype of what it belongs to."""
    floor = 1e-4 * norms(x[0].double() * ref["dq"], 64) if ref["dq"] is not None else None # of dg
    bad = []
    for name, y in ref.items():
        like = x[2] if name == "o" else x[5] if name == "S" else x[NAMES.index(name[1:])]
        if y is None: # autograd found no path: ours may say zero
            assert out[name] is None or not out[name].any(), name
            continue
        assert out[name].dtype == like.dtype and out[name].shape == like.shape, (name, out[name].shape)
        if name in ("S", "dS0"):
            error, limit = (state_error(out[name], y),), (tol[name],)
        else:
            error, limit = errors(out[name], y, floor=floor if name == "dg" else None), tol[name]
        bad += [(name, error, limit)] if any(e > l for e, l in zip(error, limit)) else []
    def typical_error(name): # the worst chunk's, whatever cancels there
        size = norms(ref[name], 64)
        return errors(out[name], ref[name], floor=(0.3 * size.mean()).expand_as(size))[1]
    known = [b for b in bad if x[0].dtype == torch.bfloat16 and b[0] in GDN_LIMIT
             and typical_error(b[0]) <= GDN_LIMIT[b[0]]]
    assert bad == known, bad
    if known:
        pytest.xfail(f"(name, (worst head, worst chunk), limit): {known}")

def gdn_held_to_loop(x, segment_ids=None, no_do=False, no_dS=False, scale=None, f=None):
    """The kernels at x against autograd through the time loop in fp64."""
    do, dS = torch.randn_like(x[2]), 0.3 * torch.randn_like(x[5])
    grads = dict(do=None if no_do else do, dS=None if no_dS else dS)
    out = gdn_run(f or kernels.gated_delta_rule, x, segment_ids, **grads, scale=scale)
    x64 = [t.detach().double().requires_grad_() for t in x]
    gdn_compare(out, gdn_run(gated_delta_rule_loop, x64, segment_ids, **grads, scale=scale), x, GDN_TOL[x[0].dtype])
    return out

# on the CPU small and ragged; with a GPU also both layers of the real models, and every pair of widths
GDN_SHAPES = [(2, 1, 3, 16, 32), (1, 15, 1, 16, 16), (1, 63, 1, 16, 16), (1, 64, 1, 32, 16), (1, 65, 1, 100, 20),
              (1, 127, 1, 16, 64), (2, 200, 3, 16, 16), (1, 2, 1, 1, 1), (1, 64, 3, 256, 1), (1, 66, 2, 64, 128)]
if GPU:
    GDN_SHAPES += [(2, T, 6, 128, 128) for T in (1, 15, 63, 64, 65, 127, 200, 2049)]
    GDN_SHAPES += [(1, 2048, 6, 128, 256), (2, 2048, 8, 128, 128)]
    GDN_SHAPES += [(1, 130, H, K, V) for K, H in ((1, 3), (16, 3), (64, 3), (100, 6), (128, 6), (256, 6))
                   for V in (1, 16, 64, 100, 128, 256)]

@pytest.fixture
def bf16_dots(monkeypatch):
    """The interpreter stores bf16 as its upper 16 bits, multiplies those as integers and casts to it by truncation:
    made right here, so that the rounding of every bf16 operand can be tested on a CPU."""
    if GPU:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter
    convert = interpreter._convert_float

    def widened(x):
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data

    def dot(self, a, b, c, *_):
        return interpreter.TensorHandle(np.matmul(widened(a), widened(b), dtype=np.float32) + c.data, c.dtype.scalar)

    def cast(x, source, target, rounding):
        if source != tl.float32 or target != tl.bfloat16:
            return convert(x, source, target, rounding)
        bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
        return (bits + 0x7fff + (bits >> 16 & 1) >> 16).astype(np.uint16) # to nearest, ties to even

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter, "_convert_float", cast)

@pytest.mark.parametrize("kind", ["init", "like keys", "half the betas 0"])
def test_gdn_rounding_of_bf16(kind, bf16_dots):
    """Where neighbours take from each other, a rounding inside a sum over them would show in o, dq or dv."""
    gdn_held_to_loop(gdn_inputs(1, 192, 1, 128, 32, torch.bfloat16, kind), scale=1)

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GDN_SHAPES, ids=str)
def test_gdn_equals_the_time_loop(shape, dtype):
    gdn_held_to_loop(gdn_inputs(*shape, dtype))

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["like keys", "gate 0", "gate -5", "gate -50", "half the gates -50", "resets",
                                  "beta 0", "beta 1e-4", "beta 1", "half the betas 0"])
def test_gdn_at_the_edges_of_its_inputs(kind, dtype):
    x = gdn_inputs(*((2, 1000, 6, 128, 128) if GPU else (1, 130, 1, 16, 16)), dtype, kind)
    gdn_held_to_loop(x, scale=1) # an int, on purpose

def test_gdn_writes_nothing_where_beta_is_0():
    """dv is 0 to the bit there and only there, over more rows than one program clears, the last one's not all."""
    x = gdn_inputs(3, 129, 3, 16, 16, torch.float32, "half the betas 0")
    dv = gdn_run(kernels.gated_delta_rule, x, do=torch.randn_like(x[2]))["dv"]
    assert torch.equal(dv.any(-1), x[4] > 0)

GDN_BOUNDARIES = {"1": [1], "63": [63], "64": [64], "65": [65], "several in one chunk": [3, 63, 64, 70, 71, 100, 150],
                  "one token each": range(1, 140)}

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts, kind", [(name, "init") for name in GDN_BOUNDARIES]
                         + [("several in one chunk", "half the gates -50")])
def test_gdn_segments(starts, kind, dtype):
    B, T, H, K, V = (2, 1000, 6, 128, 256) if GPU else (2, 140, 1, 16, 16)
    ids = torch.zeros(B, T, dtype=torch.int32, device=DEVICE)
    for t in GDN_BOUNDARIES[starts]:
        ids[0, t:] += 1 # the second row is one document
    x = gdn_inputs(B, T, H, K, V, dtype, kind)
    # nothing of one document reaches the next, not even a bit
    first = GDN_BOUNDARIES[starts][0]
    o, S = kernels.gated_delta_rule(*x[:5], None, x[5], ids)
    with torch.no_grad():
        other = (torch.cat([t[:, :first] * 0, t[:, first:]], 1) for t in x[:5])
        o_other, S_other = kernels.gated_delta_rule(*other, None, x[5] * 2, ids)
    assert torch.equal(o_other[0, first:], o[0, first:]) and torch.equal(S_other[0], S[0])
    gdn_held_to_loop(x, ids)

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("missing", ["no_do", "no_dS"])
def test_gdn_one_output_feeds_the_loss(missing, dtype):
    gdn_held_to_loop(gdn_inputs(1, 70, 1, 16, 16, dtype), **{missing: True})

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("kind", ["init", "gate 0"])
def test_gdn_in_parts(kind, parts, dtype, monkeypatch):
    """A long sequence of few heads is swept in parts, with the transition of each."""
    monkeypatch.setattr(kernels, "gdn_parts", lambda *_: parts)
    B, T, H, K, V = (1, 2000, 6, 128, 256) if GPU else (1, 300, 1, 16, 32)
    ids = None
    if kind == "gate 0":
        ids = (torch.arange(T, device=DEVICE) >= 250).int().expand(B, T)
    gdn_held_to_loop(gdn_inputs(B, T, H, K, V, dtype, kind), ids)

def test_gdn_parts_fill_the_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("", (), dict(multi_processor_count=132)))
    assert kernels.gdn_parts(384, 32, None) == 1 and kernels.gdn_parts(70, 512, None) == 1
    for programs, NT in ((8, 1024), (1, 1024), (40, 1000), (8, 100)):
        NS = kernels.gdn_parts(programs, NT, None)
        size = -(-NT // NS)
        assert NS > 1 and NS * programs <= 132 and size * (NS - 1) < NT # none is empty

@pytest.mark.parametrize("dtype", DTYPES)
def test_gdn_any_strides(dtype):
    x = gdn_inputs(2, 70, 3 if GPU else 2, 16, 16, dtype)
    K_last = lambda t: t.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    do, dS = torch.randn_like(x[2])[:1, :1].expand_as(x[2]), K_last(torch.randn_like(x[5]))
    ref = gdn_run(kernels.gated_delta_rule, x, do=do.contiguous(), dS=dS.contiguous())

    def shifted(t): # off the 16-byte grid
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t.detach())

    y = [shifted(t.transpose(1, 2)).transpose(1, 2).requires_grad_() for t in x[:5]] + [K_last(x[5]).requires_grad_()]
    out = gdn_run(kernels.gated_delta_rule, y, do=do, dS=dS)
    off = [shifted(t).requires_grad_() for t in x]
    for other in (out, gdn_run(kernels.gated_delta_rule, off, do=do, dS=dS)):
        assert all(torch.equal(other[n], ref[n]) for n in ref)

@pytest.mark.parametrize("dtype", DTYPES)
def test_gdn_same_bits_twice_and_nothing_unwritten(dtype, monkeypatch):
    x = gdn_inputs(1, 150, 2 if GPU else 1, 16, 32, dtype)
    do, dS = torch.randn_like(x[2]), torch.randn_like(x[5])
    for parts in (1, 2):
        monkeypatch.setattr(kernels, "gdn_parts", lambda *_: parts)
        first = gdn_run(kernels.gated_delta_rule, x, do=do, dS=dS)
        torch.use_deterministic_algorithms(True, warn_only=True) # torch.empty is filled with NaN
        try:
            assert torch.empty(8, device=DEVICE).isnan().all()
            second = gdn_run(kernels.gated_delta_rule, x, do=do, dS=dS)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(first[n], second[n]) for n in first)

def test_gdn_carries_its_state():
    """A sequence in two calls, the state carried, equals one call."""
    x = gdn_inputs(1, 100, 1, 16, 16, torch.float32)

    def in_two(q, k, v, g, beta, scale, S0, segment_ids):
        o1, S = kernels.gated_delta_rule(*(t[:, :37] for t in (q, k, v, g, beta)), scale, S0)
        o2, S = kernels.gated_delta_rule(*(t[:, 37:] for t in (q, k, v, g, beta)), scale, S)
        return torch.cat([o1, o2], 1), S

    gdn_held_to_loop(x, f=in_two)

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, V", [(16, 32), (100, 20), (1, 1)] + [(128, 256)] * GPU)
def test_gdn_step(K, V, dtype):
    """Steps against the loop, from a state of either layout, updated in place; then one more after the chunk kernel."""
    x = [t.detach() for t in gdn_inputs(2, 4, 3, K, V, dtype)]
    o_ref, S_ref = gated_delta_rule_loop(*(t.double() for t in x[:5]), None, x[5].double())
    K_last = x[5].transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)
    for state in (x[5].clone(), K_last):
        o = torch.stack([kernels.gated_delta_rule_step(*(t[:, i] for t in x[:5]), state) for i in range(4)], 1)
        assert o.dtype == dtype and state_error(state, S_ref) < 1e-5
        assert max(errors(o, o_ref)) < (6e-3 if dtype == torch.bfloat16 else 1e-5)
    _, state = kernels.gated_delta_rule(*(t[:, :3] for t in x[:5]), None, x[5])
    o = kernels.gated_delta_rule_step(*(t[:, 3] for t in x[:5]), state)
    assert max(errors(o[:, None], o_ref[:, 3:])) < GDN_TOL[dtype]["o"][0]
    assert state_error(state, S_ref) < GDN_TOL[dtype]["S"]

def test_gdn_refuses_in_one_sentence(monkeypatch):
    x = [t.detach() for t in gdn_inputs(1, 4, 2, 16, 16, torch.float32)]

    def refused(match, f=kernels.gated_delta_rule, **changed):
        args = dict(zip(("q", "k", "v", "g", "beta", "initial_state"), x), **changed)
        with pytest.raises(AssertionError, match=match) as e:
            f(**args)
        assert "\n" not in str(e.value)

    wide = torch.zeros(1, 4, 2, 512, device=DEVICE)
    refused("K=512", q=wide, k=wide)
    refused("V=512", v=wide)
    for dtype in (torch.float16, torch.float64):
        refused("bfloat16 or float32", **{n: t.to(dtype) for n, t in zip("qkv", x)})
    refused("one shape", k=x[1][:, :3])
    refused("g must have shape", g=x[3][..., None])
    refused("g must be torch.float32", g=x[3].bfloat16())
    refused("beta must be", beta=x[4].double())
    refused("state must have shape", initial_state=x[5][:, :1])
    refused("state must be torch.float32", initial_state=x[5].bfloat16())
    refused("segment_ids must be torch.int32", segment_ids=torch.zeros(1, 4, dtype=torch.int64, device=DEVICE))
    refused("empty", **{n: t[:, :0] for n, t in zip(("q", "k", "v", "g", "beta"), x)})
    with pytest.raises(AssertionError, match="state must have shape"):
        kernels.gated_delta_rule_step(*(t[:, 0] for t in x[:5]), x[5][:, :1])
    monkeypatch.setattr(kernels, "shared_memory", lambda _: 99 * 1024)
    refused("float32 with K above 128 needs 160 KB", q=wide[..., :256], k=wide[..., :256], initial_state=None)
    monkeypatch.setattr(kernels, "INTERPRET", False)
    refused("on the CPU", **{n: t.cpu() for n, t in zip("qkv", x)})

@pytest.mark.skipif(GPU, reason="decided by the GPU there")
def test_without_tma(monkeypatch):
    """Descriptors made in the kernels, as on an A100; in parts, so that every kernel has its own."""
    monkeypatch.setattr(kernels, "has_tma", lambda _: False)
    monkeypatch.setattr(kernels, "gdn_parts", lambda *_: 2)
    gdn_held_to_loop(gdn_inputs(2, 130, 2, 16, 32, torch.float32))
    gla_check(gla_inputs(2, 70, 2, 64, 64))

def test_gdn_opcheck():
    q, k, v, g, beta, S0 = gdn_inputs(1, 20, 1, 64, 64, torch.float32) # the op itself takes padded widths
    S0 = S0.transpose(-1, -2).contiguous().detach().requires_grad_()
    ids = (torch.arange(20, device=DEVICE)[None] > 7).int()
    torch.library.opcheck(kernels.gdn_fwd, (q, k, v, g, beta, S0, ids, 0.25, True))
    token = tuple(t.detach()[:, 0] for t in (q, k, v, g, beta))
    torch.library.opcheck(kernels.gdn_step, token + (S0.detach().clone(), 0.25))

def test_gdn_compiles_without_a_break():
    x = gdn_inputs(1, 70, 2, 16, 32, torch.bfloat16 if GPU else torch.float32)
    do, dS = torch.randn_like(x[2]), torch.randn_like(x[5])
    compiled = torch.compile(kernels.gated_delta_rule, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    out, ref = (gdn_run(f, x, do=do, dS=dS) for f in (compiled, kernels.gated_delta_rule))
    assert all(torch.equal(out[n], ref[n]) for n in ref)

@gpu
def test_gdn_beyond_the_grid_and_32_bits():
    """B * H above 65,535, and tensors above 2**31 elements: the last rows against the same rows alone."""
    for B, T, H, K, V in ((70_000, 3, 1, 16, 16), (9, 130_000, 8, 16, 256)):
        x = [t.detach().requires_grad_() for t in gdn_inputs(1, T, H, K, V, torch.bfloat16)]
        wide = [t.detach().expand(B, *t.shape[1:]).contiguous().requires_grad_() for t in x]
        do, dS = torch.randn_like(x[2]), torch.randn_like(x[5])
        ref = gdn_run(kernels.gated_delta_rule, x, do=do, dS=dS)
        out = gdn_run(kernels.gated_delta_rule, wide, do=do.expand(B, *do.shape[1:]), dS=dS.expand(B, *dS.shape[1:]))
        assert all(max(errors(out[n][-1:], ref[n])) < 1e-2 for n in ("o", "dq", "dk", "dv"))

@gpu
@pytest.mark.parametrize("kind", ["init", "gate 0"])
def test_gdn_error_does_not_grow_with_time(kind):
    from model import gated_delta_rule_chunked
    worst, runs = {}, []
    for T in (512, 8192):
        x = gdn_inputs(1, T, 8, 128, 128, torch.bfloat16, kind)
        do, dS = torch.randn_like(x[2]), torch.randn_like(x[5])
        out = gdn_run(kernels.gated_delta_rule, x, do=do, dS=dS)
        x64 = [t.detach().double().requires_grad_() for t in x]
        ref = gdn_run(gated_delta_rule_chunked, x64, do=do, dS=dS)
        worst[T] = {n: errors(out[n], ref[n])[0] for n in ("o", "dq", "dk", "dv")}
        runs.append((out, ref, x))
    assert all(worst[8192][n] < 1.3 * worst[512][n] for n in worst[512]), worst
    for run in runs:
        gdn_compare(*run, GDN_TOL[torch.bfloat16])

@gpu
def test_gdn_long_and_few_heads():
    from model import gated_delta_rule_chunked
    x = gdn_inputs(1, 65536, 2, 128, 128, torch.bfloat16)
    assert kernels.gdn_parts(2, 1024, x[0].device) > 1
    do, dS = torch.randn_like(x[2]), torch.randn_like(x[5])
    x64 = [t.detach().double().requires_grad_() for t in x]
    out, ref = gdn_run(kernels.gated_delta_rule, x, do=do, dS=dS), gdn_run(gated_delta_rule_chunked, x64, do=do, dS=dS)
    gdn_compare(out, ref, x, GDN_TOL[torch.bfloat16])

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

CONV_SHAPES = [(2, 34, 2, 16, 40, 4, True, True), (1, 1, 1, 5, 7, 4, True, True), (3, 19, 2, 16, 64, 2, True, False),
               (1, 64, 1, 8, 150, 3, False, True), (7, 50, 1, 8, 8, 4, True, 7), # B, T, H, K, V, size, unit, segments
               (1, 21, 3, 48, 24, 4, False, True), (1, 21, 2, 256, 24, 4, True, True), (1, 4, 2, 16, 16, 1, True, True)]

# fp32 sums in another order: 1e-6; bf16 rounds what is returned (2e-3), and the gradient of a norm adds to it
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-6)] + [(torch.bfloat16, 6e-3)] * GPU)
@pytest.mark.parametrize("B, T, H, K, V, size, unit, segments",
                         CONV_SHAPES + [(2, 2049, 6, 128, 256, 4, True, True), (2, 2049, 4, 128, 256, 4, False, True),
                                        (1, 300, 2, 256, 256, 4, True, 7), (2, 300, 2, 64, 64, 4, True, 7)] * GPU)
def test_short_conv(dtype, tol, B, T, H, K, V, size, unit, segments, monkeypatch):
    if not GPU: # several stretches in few tokens
        monkeypatch.setattr(kernels, "CONV_TOKENS", 16)
    torch.manual_seed(0)
    x = torch.randn(B, T, H * (2 * K + V), device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(x.shape[-1], size, device=DEVICE, requires_grad=True)
    ids = (torch.rand(B, T, device=DEVICE) < 0.2).cumsum(1).int() if segments else None
    if segments == 7: # documents of 7 tokens that begin at every place of a group of four and of a stretch
        ids = ((torch.arange(T, device=DEVICE) + torch.arange(B, device=DEVICE)[:, None]) // 7).int()
    out = kernels.short_conv(x, weight, H, K, V, unit, ids)
    X, W = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    ref = short_conv_loop(X, W, H, K, V, unit, ids)
    do = [torch.randn_like(y).transpose(1, 2).contiguous().transpose(1, 2) for y in out] # not contiguous
    torch.autograd.backward(out, do)
    torch.autograd.backward(ref, [d.double() for d in do])
    for y, r in zip((*out, x.grad, weight.grad), (*ref, X.grad, W.grad)):
        assert torch.isfinite(y).all() and relative(y, r) <= tol

@gpu
def test_short_conv_above_2_31_elements():
    H, K, V = 6, 128, 256
    D = H * (2 * K + V)
    T = 2**31 // D + 300 # the last 300 tokens lie above
    x, weight = torch.randn(1, T, D, device=DEVICE, dtype=torch.bfloat16), torch.randn(D, 4, device=DEVICE)
    def run(x):
        x = x.detach().requires_grad_()
        out = kernels.short_conv(x, weight, H, K, V, True)
        torch.autograd.backward(out, [y.detach() for y in out])
        return *out, x.grad
    for y, r in zip(run(x), run(x[:, -300:])):
        # no token of these sees one that the short run lacks; stretches begin elsewhere: 2e-3, a bf16 rounding
        assert relative(y[:, -290:], r[:, -290:]) <= 2e-3

def test_short_conv_refuses_and_repeats():
    x = torch.randn(1, 9, 24, device=DEVICE, requires_grad=True)
    weight = torch.randn(24, 4, device=DEVICE, requires_grad=True)
    with pytest.raises(AssertionError, match="conv_size must be at most 4"):
        kernels.short_conv(x, torch.randn(24, 5, device=DEVICE), 1, 8, 8, True)
    ids = torch.arange(9, dtype=torch.int32, device=DEVICE).expand(1, 9)
    for wrong, heads, segments in (("x and weight must have", 2, ids), ("segment_ids must have shape", 1, ids[:, :8]),
                                   ("segment_ids must be torch.int32", 1, ids.long())):
        with pytest.raises(AssertionError, match=wrong):
            kernels.short_conv(x, weight, heads, 8, 8, True, segments)
    strided = torch.stack([ids[0]] * 2, 1).T[:1]
    for a, b in zip(*(kernels.short_conv(x, weight, 1, 8, 8, True, y) for y in (ids, strided))):
        assert torch.equal(a, b)
    torch.library.opcheck(kernels.short_conv_op, (x, weight, None, 1, 8, 8, True))
    first, second = (torch.autograd.grad(kernels.short_conv(x, weight, 1, 8, 8, True), (x, weight),
                                         [torch.ones(1, 9, 1, 8, device=DEVICE)] * 3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))

# ----------------------------------------------------------------------------------------------------------------------
# the output head

# rounding dz to bf16 leaves 2e-3 in the gradients; fp32 at the same shapes 1e-6 (tf32 on a GPU: allowed 1e-3)
@pytest.mark.parametrize("dtype, vocab, loss_tol, grad_tol", [(torch.float32, 5000, 1e-5, 1e-5)]
    + [(torch.bfloat16, 50_304, 2e-3, 4e-3)] * GPU)
def test_linear_cross_entropy(dtype, vocab, loss_tol, grad_tol, monkeypatch):
    monkeypatch.setattr(kernels, "CE_ROWS", 16) # several chunks, the last one short
    torch.manual_seed(0)
    x = torch.randn(3, 13, 64, device=DEVICE).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocab, 64, device=DEVICE)).requires_grad_()
    targets = torch.randint(0, vocab, (3, 13), device=DEVICE)
    targets[0, 0], targets[0, 1], targets[2, 7:] = 0, vocab - 1, -100 # the last few do not count
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
    x = torch.randn(20, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(100, 16, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, 100, (20,), device=DEVICE)
    torch.library.opcheck(kernels.linear_cross_entropy_op, (x, weight, targets, True))

# ----------------------------------------------------------------------------------------------------------------------
# one token through a block, and norms without gradients (the whole of it: LM.step, under model.py)

class Holder:
    def __init__(self, **tensors):
        self.__dict__.update(tensors)

def linear_step_inputs(B, N, K, int8, dtype):
    """x (B, K), two matrices as linear_step takes them, (N, K) and (N + 7, K), and as fp64, a residual (B, N)."""
    rng = torch.Generator().manual_seed(0)
    def rand(*size):
        return torch.randn(*size, generator=rng).to(DEVICE, dtype)
    x, residual, matrices = rand(B, K), rand(B, N), []
    for W in (rand(N, K) / K**0.5, rand(N + 7, K) / K**0.5):
        if int8:
            q, scale = (127 * W).round().clamp(-127, 127).to(torch.int8), torch.rand(len(W), generator=rng) / 127
            scale = scale.to(DEVICE)
            matrices.append((Holder(q=q, scale=scale), q.double() * scale.double()[:, None]))
        else:
            matrices.append((Holder(weight=W), W.double()))
    return x, residual, matrices

# fp32 sums in another order; bf16: y is rounded
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-6)] + [(torch.bfloat16, 4e-3)] * GPU)
@pytest.mark.parametrize("int8", [False, True], ids=["wide", "int8"])
@pytest.mark.parametrize("B, N, K", [
    (1, 20, 300), (3, 33, 1), (16, 40, 17), (17, 33, 288), (64, 48, 513), (65, 7, 96)] + [
    (1, 1024, 1024), (3, 2064, 1024), (16, 50_304, 1024), (17, 1024, 2432), (64, 50_304, 1024), (64, 4608, 1024),
    (65, 1024, 1536)] * GPU)
def test_linear_step(B, N, K, int8, dtype, tol):
    """
    Every kind of product: ragged rows, columns and batch, tiles of each size. The sums of squares are of y as it is
    returned, and make the norm of the next.
    """
    from kernels import linear_step
    x, residual, ((linear, W), (other, W2)) = linear_step_inputs(B, N, K, int8, dtype)
    X = x.double()
    def squares_of(y, squares): # two roundings of the same sum
        return relative(squares.sum(1), y.double().square().sum(1)) <= 1e-6
    y, squares = linear_step(x, linear)
    assert relative(y, X @ W.T) <= tol and squares_of(y, squares)
    y, squares = linear_step(x, linear, residual=residual)
    assert relative(y, X @ W.T + residual) <= tol and squares_of(y, squares)
    norm = torch.rand(B, 5, generator=torch.Generator().manual_seed(1)).to(DEVICE), 1e-3 # not x's: any number of sums
    n = X * torch.rsqrt(norm[0].double().sum(1, keepdim=True) / K + 1e-3)
    y, squares = linear_step(x, linear, norm, beside=other)
    assert relative(y, torch.cat([n @ W.T, n @ W2.T], 1)) <= tol and squares_of(y, squares)
    short = Holder(**{name: t[:N] for name, t in vars(other).items()})
    assert relative(linear_step(x, linear, norm, pair=short)[0], F.silu(n @ W.T) * (n @ W2[:N].T)) <= 2 * tol

@pytest.mark.parametrize("tile", [(16, 64, 256, 6, 1), (64, 64, 128, 5, 1)])
def test_linear_step_tiles_of_large_products(tile, monkeypatch):
    """Those that many rows take, on few: the interpreter has one multiprocessor and is slow."""
    monkeypatch.setattr(kernels, "linear_step_tiles", lambda *args: tile)
    x, residual, ((linear, W), (other, W2)) = linear_step_inputs(18, 70, 100, False, torch.float32)
    X = x.double()
    assert relative(kernels.linear_step(x, linear, residual=residual)[0], X @ W.T + residual) <= 2e-6
    assert relative(kernels.linear_step(x, linear, beside=other)[0], torch.cat([X @ W.T, X @ W2.T], 1)) <= 2e-6

@pytest.mark.skipif(GPU, reason="interprets")
def test_linear_step_is_interpreted_beside_a_gpu(monkeypatch):
    """Where Triton sees a Hopper GPU, the interpreter still meets no instruction of it."""
    monkeypatch.setattr("triton.language.target_info.current_target", lambda: SimpleNamespace(backend="cuda", arch=90))
    x, _, ((linear, W), _) = linear_step_inputs(3, 20, 30, False, torch.float32)
    assert relative(kernels.linear_step(x, linear)[0], x.double() @ W.T) <= 2e-6

@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-6)] + [(torch.bfloat16, 6e-3)] * GPU)
@pytest.mark.parametrize("H, D", [(1, 300), (3, 24)])
def test_rms_norm(H, D, dtype, tol):
    """With and without a gate, which may be columns of a wider tensor."""
    from kernels import rms_norm
    rng = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(*size, generator=rng).to(DEVICE, dtype) for size in ((2, 5, H, D), (2, 5, H * D + 16)))
    weight, gate = torch.rand(D, generator=rng).to(DEVICE) + 0.5, wide[..., 16:].unflatten(-1, (H, D))
    X, z = x.double(), gate.double()
    ref = X * torch.rsqrt(X.square().mean(-1, keepdim=True) + 1e-3) * weight.double()
    assert relative(rms_norm(x, weight, 1e-3), ref) <= tol
    for gate in (gate, gate.contiguous()):
        assert relative(rms_norm(x, weight, 1e-3, gate), ref * F.silu(z)) <= tol
    assert relative(rms_norm(x[:, 0], weight, 1e-3, gate[:, 0]), (ref * F.silu(z))[:, 0]) <= tol

# ----------------------------------------------------------------------------------------------------------------------
# model.py

from dataclasses import replace

from model import LM, ModelConfig, RMSNorm, gated_delta_rule_chunked, gla_chunked

OPERATORS = {"gla": (gla_chunked, gla_loop), "gated_delta_rule": (gated_delta_rule_chunked, gated_delta_rule_loop)}

def operator_inputs(name, T, B=2, H=2, K=5, V=3, gate="typical", beta=None):
    """fp64 inputs of an operator by its arguments' names, non-zero initial state included; seeded by the arguments."""
    rng = torch.Generator().manual_seed(T)
    def rand(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)
    x = {"q": rand(B, T, H, K), "k": rand(B, T, H, K), "v": rand(B, T, H, V), "initial_state": rand(B, H, K, V)}
    g = rand(B, T, H, K) if name == "gla" else rand(B, T, H)
    strong = torch.rand(g.shape, generator=rng) < 0.3
    x["g"] = {"typical": F.logsigmoid(g) / 4, "strong": torch.where(strong, -50.0, -g.abs()), "zero": 0 * g}[gate]
    if name == "gated_delta_rule":
        x["k"] = F.normalize(x["k"], dim=-1)
        x["beta"] = rand(B, T, H).sigmoid() if beta is None else torch.full((B, T, H), beta, dtype=torch.float64)
    return x

def operator_results(operator, inputs, **kwargs):
    """o, the final state, and the gradient of every input for a loss that weighs both."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o, S = operator(**leaves, **kwargs)
    rng = torch.Generator().manual_seed(0)
    loss = sum((x * torch.randn(x.shape, generator=rng, dtype=x.dtype)).sum() for x in (o, S))
    return {"o": o, "final_state": S, **dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))}

def assert_equal_to_loop(name, inputs, **kwargs):
    """|difference| <= 1e-10 (1 + |reference|), element by element, in fp64."""
    chunked, loop = OPERATORS[name]
    ref, out = operator_results(loop, inputs, **kwargs), operator_results(chunked, inputs, **kwargs)
    for key in ref:
        excess = (out[key] - ref[key]).abs() / (1 + ref[key].abs())
        assert excess.max() <= 1e-10, (key, excess.max())

@pytest.mark.parametrize("gate", ["typical", "strong", "zero"])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("name", OPERATORS)
def test_chunked_equals_loop(name, T, gate):
    assert_equal_to_loop(name, operator_inputs(name, T, gate=gate))
    assert_equal_to_loop(name, operator_inputs(name, T, gate=gate, K=3, V=5), scale=1.0)

@pytest.mark.parametrize("gate", ["strong", "zero"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_chunked_delta_rule_at_the_ends_of_beta(beta, gate):
    assert_equal_to_loop("gated_delta_rule", operator_inputs("gated_delta_rule", 130, gate=gate, beta=beta))

def test_chunked_delta_rule_with_equal_keys():
    inputs = operator_inputs("gated_delta_rule", 130, gate="zero", beta=1.0)
    inputs["k"] = F.normalize(inputs["k"][:, :1] + 1e-3 * inputs["k"], dim=-1)
    assert_equal_to_loop("gated_delta_rule", inputs)

@pytest.mark.parametrize("name", OPERATORS)
def test_chunked_without_initial_state(name):
    inputs = operator_inputs(name, 70)
    del inputs["initial_state"]
    assert_equal_to_loop(name, inputs)

@pytest.mark.parametrize("name", OPERATORS)
def test_chunked_segments_at_every_position(name):
    T = 12 # three chunks of 4: a boundary at every position, several in one chunk, a document over two chunks
    starts = [[t] for t in range(1, T)] + [[1, 2, 3], [4, 5, 6, 7], [2, 9], [3, 4, 8], list(range(1, T)), []]
    inputs = operator_inputs(name, T, B=len(starts), gate="typical")
    ids = torch.zeros(len(starts), T, dtype=torch.int32)
    for row, start in zip(ids, starts):
        row[start] = 1
    for step in (1, 3): # ids may skip numbers
        segment_ids = (7 + step * ids.cumsum(1)).int()
        chunked, loop = OPERATORS[name]
        for chunk_size in (4, 5, 64):
            ref = operator_results(loop, inputs, segment_ids=segment_ids)
            out = operator_results(chunked, inputs, segment_ids=segment_ids, chunk_size=chunk_size)
            for key in ref:
                assert ((out[key] - ref[key]).abs() <= 1e-10 * (1 + ref[key].abs())).all(), (key, chunk_size)

@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("gate", ["typical", "strong"])
def test_chunked_segments_at_chunk_edges(name, gate):
    ids = torch.zeros(4, 200, dtype=torch.int32)
    for row, start in zip(ids, [[63], [64], [65, 128, 192], [1, 2, 3, 100, 199]]):
        row[start] = 1
    assert_equal_to_loop(name, operator_inputs(name, 200, B=4, gate=gate), segment_ids=ids.cumsum(1).int())

@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_chunked_gradcheck(name, segments):
    inputs = operator_inputs(name, 9, B=1, H=1, K=3, V=2)
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2]], dtype=torch.int32) if segments else None
    names, operator = list(inputs), OPERATORS[name][0]
    def f(*tensors):
        return operator(**dict(zip(names, tensors)), segment_ids=ids, chunk_size=4)
    assert torch.autograd.gradcheck(f, [inputs[n].requires_grad_() for n in names], raise_exception=True)

SMALL = dict(n_layer=2, n_embd=32, n_head=2, d_key=8, d_value=16, d_mlp=48, vocab_size=64)
MODELS = {"gla": ModelConfig("gla", **SMALL), "gla with convolutions": ModelConfig("gla", **SMALL, conv_size=3),
          "gdn": ModelConfig("gdn", **SMALL, conv_size=4), "gdn without convolutions": ModelConfig("gdn", **SMALL),
          "attention": ModelConfig("attention", **{**SMALL, "d_value": 8})}

def small_model(name):
    torch.manual_seed(0)
    model = LM(MODELS[name])
    with torch.no_grad(): # larger than at initialisation, so that a lost term of the state or the convolutions shows
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(4)
    return model

@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_split_sequences_equal_one_pass(name):
    model = small_model(name)
    idx = torch.randint(64, (2, 150), generator=torch.Generator().manual_seed(0))
    whole = model.init_state(2)
    logits = model(idx)[0]
    torch.testing.assert_close(model(idx, state=whole)[0], logits, rtol=0, atol=1e-5)
    for pieces in ([64, 86], [63, 1, 86], [1, 149], [149, 1], [2, 3, 5, 70, 70], [1] * 150):
        state = model.init_state(2)
        out = torch.cat([model(x, state=state)[0] for x in idx.split(pieces, 1)], 1)
        torch.testing.assert_close(out, logits, rtol=0, atol=1e-4)
        for ours, theirs in zip(state, whole):
            for key, x in ours.items():
                if key == "length":
                    assert x == theirs[key] == 150
                else:
                    a, b = (x[:, :, :150], theirs[key][:, :, :150]) if key in "kv" else (x, theirs[key])
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

@torch.no_grad()
def uneven_norms(model):
    """Gains of the norms that are far from 1, each channel's its own."""
    for norm in model.modules():
        if isinstance(norm, RMSNorm):
            norm.weight.copy_(torch.linspace(0.5, 1.5, len(norm.weight)))
    return model

@pytest.mark.parametrize("name", ["gla", "gdn", "attention"])
@torch.no_grad()
def test_for_inference_moves_the_norms_gains_into_matrices(name):
    from sample import for_inference
    model, idx = uneven_norms(small_model(name)), torch.randint(64, (2, 70), generator=torch.Generator().manual_seed(0))
    logits = model(idx)[0]
    assert relative(for_inference(model, "cpu")(idx)[0], logits) <= 1e-5
    for norm in model.modules():
        assert not isinstance(norm, RMSNorm) or (norm is model.norm) == (norm.weight != 1).any()

# what a GPU does for a token (LM.step) against forward, which is what a CPU does
@pytest.mark.parametrize("name, int8", [*zip(MODELS, [True, False, True, False, True])])
@torch.no_grad()
def test_one_token_by_kernels_equals_forward(name, int8):
    from sample import for_inference
    model, mine = (for_inference(uneven_norms(small_model(name)), "cpu", int8) for _ in range(2))
    mine = mine.to(DEVICE)
    idx = torch.randint(64, (3, 7), generator=torch.Generator().manual_seed(0))
    a, b = model.init_state(3), mine.init_state(3)
    if name == "attention":
        b = [block.mixer.fixed_state(3, 16, torch.float32, DEVICE) for block in mine.blocks]
        for t in range(5):
            mine.step(idx[:, t].to(DEVICE), b)
    else:
        mine(idx[:, :5].to(DEVICE), state=b)
    model(idx[:, :5], state=a)
    for t in (5, 6):
        ref, logits = model(idx[:, t:t + 1], state=a)[0][:, 0], mine.step(idx[:, t].to(DEVICE), b)
        assert relative(logits.cpu(), ref) <= 1e-5
    for x, y in zip(a, b):
        for key in x.keys() - {"length"}:
            seen = slice(7 if key in ("k", "v") else None) # the cache has room for more
            assert relative(y[key].cpu()[:, :, seen], x[key][:, :, seen]) <= 1e-5, key

@pytest.mark.parametrize("name", [n for n in MODELS if n != "attention"])
@torch.no_grad()
def test_documents_do_not_see_each_other(name):
    model = small_model(name)
    idx = torch.randint(64, (1, 150), generator=torch.Generator().manual_seed(0))
    for start in (1, 3, 63, 64, 65, 149): # of document B
        ids = (torch.arange(150) >= start).int()[None]
        changed = idx.clone()
        changed[:, :start] = (changed[:, :start] + 1) % 64
        a, b = model(idx, segment_ids=ids)[0], model(changed, segment_ids=ids)[0]
        assert torch.equal(a[:, start:], b[:, start:]) and not torch.equal(a[:, :start], b[:, :start])
        torch.testing.assert_close(a[:, start:], model(idx[:, start:])[0], rtol=0, atol=1e-4) # other chunk edges

@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient_and_a_group(name):
    model = small_model(name)
    idx = torch.randint(64, (2, 71), generator=torch.Generator().manual_seed(0))
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits is None and loss.ndim == 0
    loss.backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.abs().max() > 0, key
    groups = model.optim_groups(0.1)
    decayed, rest = ({id(p) for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0] and not decayed & rest
    assert decayed | rest == {id(p) for p in model.parameters()}
    for key, p in model.named_parameters():
        matrix = p.ndim == 2 and "conv" not in key
        assert (id(p) in decayed) == matrix, key
    *groups, inner = model.optim_groups(0.1, 2.0) # the blocks' matrices apart, with the rows that are stacked in them
    assert (inner["lr_ratio"], inner["weight_decay"], [g["weight_decay"] for g in groups]) == (2.0, 0.1, [0.1, 0.0])
    assert [p.shape for p in groups[0]["params"]] == [model.embed.weight.shape]
    assert {id(p) for g in (*groups, inner) for p in g["params"]} == {id(p) for p in model.parameters()}
    assert [len(p) for p in inner["params"]] == [sum(parts) for parts in inner["parts"]]
    assert sum(len(parts) > 1 for parts in inner["parts"]) == len(model.blocks) * (2 if model.cfg.mixer == "gdn" else 1)

@pytest.mark.parametrize("name", MODELS)
def test_loss_is_the_mean_over_all_tokens(name):
    model = small_model(name)
    idx = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))
    log_p = model(idx[:, :-1])[0].log_softmax(-1)
    mean = -log_p.gather(-1, idx[:, 1:, None]).mean()
    torch.testing.assert_close(model(idx[:, :-1], idx[:, 1:])[1], mean, rtol=1e-6, atol=0)

@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_blocks_give_the_same_gradients(name):
    idx = torch.randint(64, (2, 71), generator=torch.Generator().manual_seed(0))
    grads = []
    for recompute in (False, True):
        model = small_model(name)
        model.checkpoint_blocks = recompute
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))

@pytest.mark.parametrize("shape", [dict(mixer="gla", n_layer=24, n_head=4, d_key=128, d_value=256, d_mlp=2560),
                                   dict(mixer="gdn", n_layer=21, n_head=6, d_key=128, d_value=256, d_mlp=2432,
                                        conv_size=4),
                                   dict(mixer="attention", n_layer=24, n_head=16, d_key=64, d_value=64, d_mlp=2560)],
                         ids=lambda shape: shape["mixer"])
def test_340m_means_340m(shape):
    with torch.device("meta"):
        model = LM(ModelConfig(n_embd=1024, vocab_size=50_304, expect_params=340_000_000, **shape))
        assert abs(model.num_params() / 340e6 - 1) <= 0.01
        with pytest.raises(AssertionError, match="expect_params"):
            LM(replace(model.cfg, n_layer=model.cfg.n_layer + 1))

def test_decay_parameters_stay_fp32_and_finite():
    cfg = replace(MODELS["gdn"], n_layer=1, n_head=16)
    for cast in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)):
        mixer = cast(small_model("gdn")).blocks[0].mixer
        assert mixer.in_proj.weight.dtype in (torch.bfloat16, torch.float16)
        assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    model = small_model("gdn")
    before = model.blocks[0].mixer.A_log.clone()
    assert torch.equal(model.bfloat16().blocks[0].mixer.A_log, before)
    try:
        torch.set_default_dtype(torch.bfloat16)
        for seed in range(200):
            torch.manual_seed(seed)
            mixer = LM(cfg).blocks[0].mixer
            assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
            assert torch.isfinite(mixer.A_log).all() and torch.isfinite(mixer.dt_bias).all()
            assert (mixer.A_log.exp() >= 1).all() and (mixer.A_log.exp() <= 16.01).all()
    finally:
        torch.set_default_dtype(torch.float32)

@pytest.mark.skipif(not GPU, reason="bf16 and CUDA graphs")
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_generation_on_gpu(name, int8):
    """
    Logits in a batch within 2e-2 of those alone, and within 4e-2 of fp32's: these models have large weights, and
    PyTorch's own layers in bf16 on a CPU are up to 2.7e-2 off. A graph's tokens are those of the steps that it holds.
    """
    from sample import Decoder, for_inference, prefill
    mine, ref = for_inference(small_model(name), "cuda", int8), for_inference(small_model(name), "cpu", int8)
    idx, alone = torch.randint(64, (64, 140), generator=torch.Generator().manual_seed(0)), None
    full = ref(idx)[0][:, 130:]
    for batch in (1, 16, 17, 64):
        state, logits = prefill(mine, idx[:batch, :131].cuda(), piece=128)
        free, text = (Decoder(mine, batch, 64, temperature=0, top_k=0, top_p=1, room=140) for _ in range(2))
        free.start(state, logits), text.start(state, logits)
        logits, tokens = [logits], [free.token[:, 0].clone()]
        for t in range(131, 140): # the text as it is, token by token; beside it the tokens of a graph
            logits.append(mine.step(idx[:batch, t].cuda(), text.state))
            free.step()
            tokens.append(free.token[:, 0].clone())
        logits = torch.stack(logits, 1)
        alone = logits if alone is None else alone
        assert relative(logits[:1], alone) <= 2e-2 and relative(logits.cpu(), full[:batch]) <= 4e-2
        text.start(state, logits[:, 0])
        for token, after in zip(tokens, tokens[1:]):
            assert torch.equal(mine.step(token, text.state).argmax(-1), after)

@pytest.mark.skipif(not GPU, reason="on a CPU the chunked forms are compared with themselves")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_model_on_gpu_equals_cpu(name, compiled):
    model = small_model(name)
    mine = small_model(name).cuda()
    if compiled:
        torch._dynamo.reset() # the graphs of other tests' models count towards one limit
        mine.compile(fullgraph=True, dynamic=False)
    idx = torch.randint(64, (2, 151), generator=torch.Generator().manual_seed(0))
    ids = None if name == "attention" else (idx[:, :-1] == 7).cumsum(1).int()
    loss = model(idx[:, :-1], idx[:, 1:], ids)[1]
    loss.backward()
    again = mine(idx[:, :-1].cuda(), idx[:, 1:].cuda(), None if ids is None else ids.cuda())[1]
    again.backward()
    assert abs(loss.item() - again.item()) <= 1e-4 * loss.item() # fp32 with tf32 off; measured below 1e-6
    for (key, p), q in zip(model.named_parameters(), mine.parameters()):
        assert relative(q.grad.cpu(), p.grad) <= 2e-3, key
    if name == "attention" and compiled:
        return # its cache grows: each length would be compiled anew
    with torch.no_grad(): # one token at a time, through the step kernels
        state = mine.init_state(2)
        logits = torch.cat([mine(x.cuda(), state=state)[0] for x in idx[:, :-1].split([100] + [1] * 50, 1)], 1)
        torch.testing.assert_close(logits.cpu(), model(idx[:, :-1])[0], rtol=0, atol=1e-3)

# ----------------------------------------------------------------------------------------------------------------------
# the published layers: small models of flash-linear-attention (FLA), their weights carried into ours, same tokens
#
#     pip install flash-linear-attention==0.6.0 && pytest -s test_kernels.py -k published     # skipped without
#
# On a CPU FLA's Triton kernels run in the interpreter, beside model.py's definitions; on a GPU beside kernels.py, but
# for FLA's chunked gated delta rule, whose time loop stands in there: its backward is wrong on Hopper with Triton 3.4
# to 3.7.0, and its solve is in tf32 (logits in fp32 6e-4 off).
# The functions are the same. What differs: our q, k, v (and what GLA's gate reads) come from one stacked projection and
# convolution; the head is always tied; under autocast our gates stay fp32; first values differ (model.init_weights).

FLA_NAMES = { # of each parameter of our block i: FLA's in layer i, stacked along the rows where there are several
    "mixer_norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "attn.q_proj.weight attn.k_proj.weight attn.v_proj.weight",
    "mixer.conv.weight": "attn.q_conv1d.weight attn.k_conv1d.weight attn.v_conv1d.weight", # (D, size), FLA (D, 1, size)
    "mixer.ab_proj.weight": "attn.a_proj.weight attn.b_proj.weight",
    "mixer.A_log": "attn.A_log",
    "mixer.dt_bias": "attn.dt_bias",
    "mixer.gate_proj.weight": "attn.g_proj.weight",
    "mixer.norm.weight": "attn.o_norm.weight",
    "mixer.out_proj.weight": "attn.o_proj.weight",
    "mlp_norm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.value_proj.weight": "mlp.up_proj.weight",
    "mlp.out_proj.weight": "mlp.down_proj.weight",
}
FLA_GLA_NAMES = {**FLA_NAMES,
    "mixer.in_proj.weight": FLA_NAMES["mixer.in_proj.weight"] + " attn.gk_proj.0.weight",
    "mixer.decay_proj.weight": "attn.gk_proj.1.weight",
    "mixer.decay_proj.bias": "attn.gk_proj.1.bias",
    "mixer.norm.weight": "attn.g_norm_swish_gate.weight",
}

def fla_names(name, mixer):
    """FLA's names of what our parameter `name` stacks. lm_head.weight is none of them: it must be the embedding."""
    if not name.startswith("blocks."):
        return [{"embed.weight": "model.embeddings.weight", "norm.weight": "model.norm.weight"}[name]]
    _, i, name = name.split(".", 2)
    return [f"model.layers.{i}.{x}" for x in (FLA_GLA_NAMES if mixer == "gla" else FLA_NAMES)[name].split()]

@torch.no_grad()
def carry(fla, model):
    """Copies `fla`, an FLA model's parameters by name, into our model; every one must have its place."""
    used = {name: fla_names(name, model.cfg.mixer) for name, _ in model.named_parameters()}
    missing = set(fla) ^ set(sum(used.values(), []))
    assert not missing, f"only in one of the two models: {', '.join(sorted(missing))}"
    for name, p in model.named_parameters():
        p.copy_(torch.cat([fla[x] for x in used[name]]).view_as(p))

FLA_SIZES = dict(n_layer=2, n_embd=48, n_head=3, d_key=16, d_value=32, d_mlp=80, vocab_size=64)
PUBLISHED = {f"{mixer}, convolutions of {size}": ModelConfig(mixer, conv_size=size, **FLA_SIZES)
             for mixer in ("gla", "gdn") for size in (0, 4)}

def fla_time_loop(q, k, v, g, beta, A_log, dt_bias, initial_state=None, cu_seqlens=None, **kwargs):
    """chunk_gated_delta_rule as FLA's layer calls it, by FLA's own naive functions."""
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    assert initial_state is None
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q.float(), k.float())) # FLA's l2norm
    documents = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    args = (q, k, v, beta.float().sigmoid(), naive_gdn_gate(g, A_log, dt_bias))
    o, S = zip(*[naive_recurrent_gated_delta_rule(*x, output_final_state=True)
                 for x in zip(*[y.split(documents, 1) for y in args])])
    return torch.cat(o, 1).to(v.dtype), S[-1].transpose(2, 3)

@pytest.fixture
def published(request, monkeypatch):
    """FLA's model, ours with its weights, and tokens (2, 100), by a name of PUBLISHED."""
    fla, cfg = pytest.importorskip("fla.models", exc_type=ImportError), PUBLISHED[request.param]
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee") # FLA's fp32 products in fp32, not tf32
    # FLA's autotuners take their first configuration, untimed
    monkeypatch.setattr("triton.runtime.autotuner.Autotuner._bench", lambda *args, **kwargs: 0.0)
    if not GPU: # in the interpreter loop indices are tensors, as compiled
        import triton.language as tl
        for module in ("chunk_h", "chunk_delta_h"):
            monkeypatch.setattr(importlib.import_module("fla.ops.common." + module), "range", raising=False,
                                value=lambda *args: (tl.full((), i, tl.int32) for i in range(*args)))
    elif cfg.mixer == "gdn":
        monkeypatch.setattr("fla.layers.gated_deltanet.chunk_gated_delta_rule", fla_time_loop)
    H, K, V, C = cfg.n_head, cfg.d_key, cfg.d_value, cfg.n_embd
    common = dict(hidden_size=C, num_heads=H, intermediate_size=cfg.d_mlp, num_hidden_layers=cfg.n_layer,
                  vocab_size=cfg.vocab_size, norm_eps=cfg.norm_eps, use_short_conv=cfg.conv_size > 0,
                  conv_size=cfg.conv_size, tie_word_embeddings=True, fuse_cross_entropy=False)
    torch.manual_seed(0)
    if cfg.mixer == "gla":
        theirs = fla.GLAForCausalLM(fla.GLAConfig(expand_k=H * K / C, expand_v=H * V / C, **common))
    else:
        theirs = fla.GatedDeltaNetForCausalLM(fla.GatedDeltaNetConfig(head_dim=K, expand_v=V / K, **common))
    with torch.no_grad(): # larger than FLA initialises all but A_log and dt_bias, so that a lost or swapped term shows
        for name, p in theirs.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                p.add_(torch.randn_like(p), alpha=0.05 if p.ndim == 2 else 0.3)
    ours = LM(cfg)
    carry(dict(theirs.named_parameters()), ours)
    return theirs.to(DEVICE), ours.to(DEVICE), torch.randint(cfg.vocab_size, (2, 100)).to(DEVICE)

def worst_token(x, ref):
    return ((x.double() - ref.double()).norm(dim=-1) / ref.double().norm(dim=-1)).max().item()

# relative errors of the loss, of the worst token's logits, of the worst parameter's gradient. On a CPU: fp32 3e-7,
# 1e-5, 2e-5; ours in bf16 against ours in fp32 4e-4, 0.15, 0.22 (A_log, three numbers). On an H200 within these bounds
PUBLISHED_TOL = {torch.float32: (1e-5, 2e-5, 1e-4), torch.bfloat16: (1e-2, 0.25, 0.4)}

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("published", PUBLISHED, indirect=True)
def test_published_loss_logits_and_gradients(published, dtype):
    theirs, ours, idx = published
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        ref, loss = theirs(idx, labels=idx, use_cache=False), ours(idx[:, :-1], idx[:, 1:])[1]
        logits = ours(idx)[0]
    ref.loss.backward()
    loss.backward()
    error = {"loss": abs(loss.item() / ref.loss.item() - 1), "logits": worst_token(logits, ref.logits)}
    p = dict(theirs.named_parameters())
    for name, q in ours.named_parameters():
        names = fla_names(name, ours.cfg.mixer)
        for x, grad in zip(names, q.grad.split([len(p[x]) for x in names])):
            error[x] = relative(grad, p[x].grad.view_as(grad))
    last = max(list(error)[2:], key=error.get)
    print(f"loss {error['loss']:.1e} logits {error['logits']:.1e} gradients up to {error[last]:.1e} ({last})")
    tol = PUBLISHED_TOL[dtype]
    assert error["loss"] <= tol[0] and error["logits"] <= tol[1] and error[last] <= tol[2], error

@pytest.mark.parametrize("published", PUBLISHED, indirect=True)
@torch.no_grad()
def test_published_state_and_documents(published):
    theirs, ours, idx = published
    theirs.eval() # so that FLA's recurrent kernels take up to 64 tokens
    state, cache, error = ours.init_state(2), None, {}
    for piece in idx.split([95, 4, 1], 1):
        ref = theirs(piece, past_key_values=cache, use_cache=True)
        cache = ref.past_key_values
        error[f"logits of {piece.shape[1]}"] = worst_token(ours(piece, state=state)[0], ref.logits)
        for mine, fla in zip(state, cache):
            error[f"state after {piece.shape[1]}"] = state_error(mine["S"], fla["recurrent_state"].transpose(2, 3))
            if "conv" in mine: # FLA keeps (B, D, size) of each of q, k and v
                past = torch.cat([x[..., 1:] for x in fla["conv_state"]], 1).transpose(1, 2)
                error[f"convolution after {piece.shape[1]}"] = relative(mine["conv"], past)
    starts = torch.tensor([0, 30, 31, 100], device=DEVICE) # of documents, packed into one row
    ids = torch.bucketize(torch.arange(100, device=DEVICE), starts, right=True).int()[None]
    ref = theirs(idx[:1], use_cache=False, cu_seqlens=starts)
    error["documents"] = worst_token(ours(idx[:1], segment_ids=ids)[0], ref.logits)
    print({key: f"{x:.1e}" for key, x in error.items()})
    assert max(error.values()) <= 2e-5, error # measured 1e-5
