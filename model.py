"""
A language model with linear-time token mixing, the whole of it in this file. Three mixers behind one interface:

- "gla", Gated Linear Attention (Yang et al. 2023, arXiv:2312.06635): a K x V state per head, decayed per key channel;
- "gdn", Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464): one decay per head, a delta-rule update;
- "attention": causal softmax attention with rotary positions, the baseline.

Around them: pre-norm blocks, RMSNorm, SwiGLU, no biases but the gate's, embeddings tied to the output head.
Parameters are fp32 and products run in the autocast dtype; gates, norms and states are in fp32 always. `gla_chunked`
and `gated_delta_rule_chunked` define the two operators and run anywhere; on a GPU the mixers call kernels.py instead.

Letters: B batch, T time, C n_embd, H heads, K key dim per head, V value dim per head.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

@dataclass(frozen=True)
class ModelConfig:
    mixer: str = "gla" # "gla", "gdn" or "attention"
    n_layer: int = 24
    n_head: int = 4
    n_embd: int = 1024
    d_key: int = 128 # per head
    d_value: int = 256 # per head
    d_mlp: int = 2560 # inner width of SwiGLU
    conv_size: int = 0 # width of the short convolutions on q, k and v in tokens, 0: none
    vocab_size: int = 50_304 # GPT-2's 50,257 rounded up to a multiple of 128
    norm_eps: float = 1e-6
    expect_params: int = 0 # stop if the parameter count is off by over 1%, 0: do not look

GATE_RANK = 16 # of GLA's gate projection
GATE_NORMALIZER = 16 # GLA's log gate is logsigmoid(x) / 16, so a token forgets little at the start (paper, section 4.4)

# ----------------------------------------------------------------------------------------------------------------------
# the two operators, chunk by chunk
#
# With G_i = g_1 + ... + g_i inside a chunk and S the state that enters it, the recurrences become, for GLA,
#   o_i = scale (q_i e^{G_i}) S + scale sum_{j<=i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j,
#   S'  = diag(e^{G_last}) S + sum_j (k_j e^{G_last - G_j}) v_j^T,
# and for the gated delta rule, whose g is a number per head, with D_ij = e^{G_i - G_j} for j <= i,
#   (I + strict_lower(beta k k^T * D)) U = beta (v - e^G k S),   o = scale ((q e^G) S + (q k^T * D) U),
#   S'  = e^{G_last} S + (k e^{G_last - G})^T U.
# G_i - G_j <= 0 wherever it is exponentiated, so nothing overflows however strong the gates are.
# Where the segment id changes the state is zero: G sums within a segment only, pairs of different segments are masked,
# a token sees S only in the segment that S came from, and S' keeps only what belongs to the last token's segment.

def chunks(chunk_size, segment_ids, *tensors):
    """
    Yields, chunk by chunk, `tensors` as (B, H, C, ...) and three masks: (B, 1, C, C), the pairs j <= i of one segment;
    (B, 1, C), the tokens in the segment that S came from; (B, 1, 1, 1), whether the last one is.
    """
    B, T = tensors[0].shape[:2]
    if segment_ids is None:
        segment_ids = torch.zeros(B, T, dtype=torch.int32, device=tensors[0].device)
    incoming = segment_ids[:, :1]
    for t in range(0, T, chunk_size):
        ids = segment_ids[:, t:t + chunk_size]
        pair = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
        first, keep = (ids == incoming)[:, None], (ids[:, -1:] == incoming)[:, None, None]
        incoming = ids[:, -1:]
        yield *(x[:, t:t + chunk_size].transpose(1, 2) for x in tensors), pair, first, keep

def gla_chunked(q, k, v, g, scale=None, initial_state=None, segment_ids=None, chunk_size=64):
    """
    Gated linear attention, S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t (arXiv:2312.06635, eq. 3).
    q, k, g (B, T, H, K), v (B, T, H, V); g <= 0 is the log decay; initial_state (B, H, K, V); segment_ids (B, T),
    non-decreasing, the state is reset where they change and initial_state belongs to the first token's. scale: K**-0.5.
    Returns o (B, T, H, V) and the final state (B, H, K, V). Any floating dtype.
    """
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q, k, v, g, pair, first, keep in chunks(chunk_size, segment_ids, q, k, v, g):
        G = pair.to(g.dtype) @ g # cumulative, (B, H, C, K)
        D = (G[:, :, :, None] - G[:, :, None]).masked_fill(~pair[..., None], -math.inf).exp() # (B, H, C, C, K)
        P = torch.einsum("bhik,bhijk,bhjk->bhij", q, D, k)
        o.append(scale * ((q * G.exp() * first[..., None]) @ S + P @ v))
        S = (G[:, :, -1].exp()[..., None] * keep) * S + (k * D[:, :, -1]).transpose(2, 3) @ v
    return torch.cat(o, 2).transpose(1, 2), S

def gated_delta_rule_chunked(q, k, v, g, beta, scale=None, initial_state=None, segment_ids=None, chunk_size=64):
    """
    The gated delta rule, S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T, o_t = scale S_t^T q_t
    (arXiv:2412.06464, eq. 10). q, k (B, T, H, K), k of unit norm; v (B, T, H, V); g <= 0 and beta (B, T, H); the rest
    as in gla_chunked. Returns o (B, T, H, V) and the final state (B, H, K, V).
    """
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    o = []
    for q, k, v, g, beta, pair, first, keep in chunks(chunk_size, segment_ids, q, k, v, g, beta):
        G, beta = (pair.to(g.dtype) @ g[..., None])[..., 0], beta[..., None] # (B, H, C), (B, H, C, 1)
        D = (G[..., None] - G[:, :, None]).masked_fill(~pair, -math.inf).exp() # (B, H, C, C)
        e = (G.exp() * first)[..., None]
        M = (beta * (k @ k.transpose(2, 3)) * D).tril(-1) # the diagonal is taken as 1 by the solve
        U = torch.linalg.solve_triangular(M, beta * (v - e * (k @ S)), upper=False, unitriangular=True)
        o.append(scale * ((q * e) @ S + ((q @ k.transpose(2, 3)) * D) @ U))
        S = (G[:, :, -1].exp()[..., None, None] * keep) * S + (k * D[:, :, -1, :, None]).transpose(2, 3) @ U
    return torch.cat(o, 2).transpose(1, 2), S

# ----------------------------------------------------------------------------------------------------------------------
# norms and the short convolution

class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x, gate=None):
        """x / rms(x) * weight, times silu(gate) where a gate is given; in fp32, returned in x's dtype."""
        y = x.float()
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self.eps) * self.weight
        if gate is not None:
            gate = gate.float()
            y = y * gate * gate.sigmoid() # not F.silu, whose gradient computes the sigmoid once more
        return y.to(x.dtype)

def unit(x):
    """x / |x| over the last dimension, in fp32, returned in x's dtype; 1e-6 keeps a zero vector zero."""
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)

class ShortConv(nn.Module):
    """Depthwise causal convolution over `size` tokens, then SiLU. It does not look past a document's start."""
    def __init__(self, width, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, size)) # the last column is the current token's

    def forward(self, x, segment_ids=None):
        """x (B, T, D) -> (B, T, D), computed in fp32."""
        T, size = x.shape[1], self.weight.shape[1]
        y = 0
        for s in range(size): # s tokens back
            tap = F.pad(x, (0, 0, s, 0))[:, :T].float()
            if segment_ids is not None:
                tap = tap * (F.pad(segment_ids, (s, 0), value=-1)[:, :T] == segment_ids)[..., None]
            y = y + tap * self.weight[:, size - 1 - s].float()
        return F.silu(y).to(x.dtype)

# ----------------------------------------------------------------------------------------------------------------------
# the mixers: forward(x (B, T, C), segment_ids (B, T) or None, state or None) -> (B, T, C)

class GLA(nn.Module):
    """Gated Linear Attention; parameters as in FLA's GatedLinearAttention, what q, k, v and the decay read stacked."""
    def __init__(self, cfg):
        super().__init__()
        H, K, V = self.dims = cfg.n_head, cfg.d_key, cfg.d_value
        self.split = [H * (K + K + V), GATE_RANK] # rows of in_proj: q, k and v; what the decay is made from
        self.in_proj = nn.Linear(cfg.n_embd, sum(self.split), bias=False)
        self.in_proj.parts = [H * K, H * K, H * V, GATE_RANK] # rows of the matrices stacked in it, see optim_groups
        self.decay_proj = nn.Linear(GATE_RANK, H * K)
        self.gate_proj = nn.Linear(cfg.n_embd, H * V, bias=False) # the output gate
        self.conv = ShortConv(self.split[0], cfg.conv_size) if cfg.conv_size else None
        self.norm = RMSNorm(V, cfg.norm_eps) # over each head's values
        self.out_proj = nn.Linear(H * V, cfg.n_embd, bias=False)

    def init_state(self, batch, device):
        H, K, V = self.dims
        state = {"S": torch.zeros(batch, H, V, K, device=device).transpose(2, 3)} # K-contiguous, as the kernels keep it
        if self.conv is not None: # the last tokens' q, k and v before the convolution
            state["conv"] = torch.zeros(batch, self.conv.weight.shape[1] - 1, H * (K + K + V), device=device)
        return state

    def forward(self, x, segment_ids=None, state=None):
        H, K, V = self.dims
        qkv, low = self.in_proj.weight.split(self.split)
        q, k, v = heads(x, qkv, self.dims, self.conv, False, segment_ids, state)
        g, fused = self.decay_proj(F.linear(x, low)).unflatten(-1, (H, K)), {}
        if x.is_cuda and x.shape[1] > 1: # the kernels take g as logits
            fused = {"logits": True}
        else: # in fp32: products of many gates near 1 decide how far the state remembers
            g = F.logsigmoid(g.float()) / GATE_NORMALIZER
        o = mix("gla", (q, k, v, g), segment_ids, state, **fused)
        o = self.norm(o, self.gate_proj(x).unflatten(-1, (H, V)))
        return self.out_proj(o.flatten(2))

class GatedDeltaNet(nn.Module):
    """Gated DeltaNet; parameters as in FLA's GatedDeltaNet, those of q, k and v stacked."""
    def __init__(self, cfg):
        super().__init__()
        H, K, V = self.dims = cfg.n_head, cfg.d_key, cfg.d_value
        self.in_proj = nn.Linear(cfg.n_embd, H * (K + K + V), bias=False) # q, k and v
        self.in_proj.parts = [H * K, H * K, H * V]
        self.ab_proj = nn.Linear(cfg.n_embd, 2 * H, bias=False) # what the decay and beta are made from
        self.ab_proj.parts = [H, H]
        self.gate_proj = nn.Linear(cfg.n_embd, H * V, bias=False) # the output gate
        self.conv = ShortConv(H * (K + K + V), cfg.conv_size) if cfg.conv_size else None
        self.A_log = nn.Parameter(torch.empty(H, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(H, dtype=torch.float32))
        self.norm = RMSNorm(V, cfg.norm_eps) # over each head's values
        self.out_proj = nn.Linear(H * V, cfg.n_embd, bias=False)

    def _apply(self, fn, recurse=True):
        # casts pass these two by: rounded to bf16 and exponentiated, their error compounds over thousands of tokens
        kept = (self.A_log, self.dt_bias)
        return super()._apply(lambda x: x.to(fn(x).device) if any(x is p for p in kept) else fn(x), recurse)

    init_state = GLA.init_state

    def forward(self, x, segment_ids=None, state=None):
        H, K, V = self.dims
        q, k, v = heads(x, self.in_proj.weight, self.dims, self.conv, True, segment_ids, state)
        # 2H = 12 rows are padded to 16: cuBLAS has no fast kernel for rows that are not a multiple of 16 bytes
        ab = F.linear(x, F.pad(self.ab_proj.weight, (0, 0, 0, -2 * H % 8)))
        a, b = ab[..., :H].float(), ab[..., H:2 * H].float() # (B, T, H)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias) # log decay
        o = mix("gated_delta_rule", (q, k, v, g, b.sigmoid()), segment_ids, state)
        o = self.norm(o, self.gate_proj(x).unflatten(-1, (H, V)))
        return self.out_proj(o.flatten(2))

def heads(x, weight, dims, conv, unit_length, segment_ids, state):
    """
    q, k (B, T, H, K) and v (B, T, H, V) of x (B, T, C): its product with weight (H (K + K + V), C), then the short
    convolution where there is one, which continues state["conv"]; q and k scaled to unit length, if asked.
    """
    (H, K, V), T, past = dims, x.shape[1], 0
    # one product: the kernels read q, k and v as columns of it, the convolution also joins their gradients
    qkv = F.linear(x, weight)
    if conv is not None and state is not None: # the tokens before, of the first token's segment, and then these
        past = state["conv"].shape[1]
        qkv = torch.cat([state["conv"].to(qkv.dtype), qkv], 1)
        state["conv"].copy_(qkv[:, T:])
        if segment_ids is not None:
            segment_ids = torch.cat([segment_ids[:, :1].expand(-1, past), segment_ids], 1)
    if conv is not None and qkv.is_cuda:
        import kernels
        return [y[:, past:] for y in kernels.short_conv(qkv, conv.weight, H, K, V, unit_length, segment_ids)]
    if conv is not None:
        qkv = conv(qkv, segment_ids)[:, past:]
    elif unit_length: # Gated DeltaNet has the convolution's SiLU without it too
        qkv = F.silu(qkv)
    q, k, v = (y.unflatten(-1, (H, -1)) for y in qkv.split([H * K, H * K, H * V], -1))
    return (unit(q), unit(k), v) if unit_length else (q, k, v)

def mix(name, inputs, segment_ids, state, **options):
    """
    gla or gated_delta_rule over a sequence, which continues and updates `state` where one is given. By device:
    kernels.py on a GPU, its one-token step included; the chunked form, in fp32, on a CPU.
    """
    state = state and state["S"]
    if inputs[0].is_cuda:
        import kernels
        if state is not None and inputs[0].shape[1] == 1:
            return getattr(kernels, name + "_step")(*(x[:, 0] for x in inputs), state)[:, None]
        o, S = getattr(kernels, name)(*inputs, initial_state=state, segment_ids=segment_ids, **options)
    else:
        operator = {"gla": gla_chunked, "gated_delta_rule": gated_delta_rule_chunked}[name]
        o, S = operator(*(x.float() for x in inputs), initial_state=state, segment_ids=segment_ids)
    if state is not None:
        state.copy_(S)
    return o.to(inputs[0].dtype)

class Attention(nn.Module):
    """Causal softmax attention over the whole row, rotary positions (base 10,000), a key-value cache when decoding."""
    def __init__(self, cfg):
        super().__init__()
        H, K, V = self.dims = cfg.n_head, cfg.d_key, cfg.d_value
        self.in_proj = nn.Linear(cfg.n_embd, H * (K + K + V), bias=False)
        self.in_proj.parts = [H * K, H * K, H * V]
        self.out_proj = nn.Linear(H * V, cfg.n_embd, bias=False)

    def init_state(self, batch, device):
        H, K, V = self.dims
        empty = torch.zeros(batch, H, 0, max(K, V), device=device)
        return {"length": 0, "k": empty[..., :K], "v": empty[..., :V]}

    def forward(self, x, segment_ids=None, state=None):
        (H, K, V), T = self.dims, x.shape[1]
        # a product each: kept for backward, a slice of one product would keep all of it. (B, H, T, K) and (B, H, T, V)
        weights = self.in_proj.weight.split([H * K, H * K, H * V])
        q, k, v = (F.linear(x, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in weights)
        past = 0 if state is None else state["length"]
        q, k = rotate(q, past), rotate(k, past) # (B, H, T, K)
        if state is not None:
            k, v = (cached(state, name, y) for name, y in (("k", k), ("v", v)))
            state["length"] += T
        if past == 0 or T == 1: # T == 1: the newest query sees every key
            o = F.scaled_dot_product_attention(q, k, v, is_causal=past == 0)
        else:
            from torch.nn.attention.bias import causal_lower_right # importing it takes 2 s, which training need not
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(T, past + T))
        return self.out_proj(o.transpose(1, 2).flatten(2))

    def fixed_state(self, batch, room, dtype, device):
        """A state for `step`: memory for `room` tokens that stays where it is, the length known to the device alone."""
        H, K, V = self.dims
        k, v = (torch.zeros(batch, H, room, D, dtype=dtype, device=device) for D in (K, V))
        return {"length": torch.zeros(1, dtype=torch.int64, device=device), "k": k, "v": v}

    def seen(self, state, dtype):
        """For `step`: the newest token's rotary_table, and what to add to its scores, -inf where no token is yet."""
        position, room = state["length"], state["k"].shape[2]
        mask = torch.zeros(1, room, dtype=dtype, device=position.device)
        mask.masked_fill_(torch.arange(room, device=position.device) > position, -math.inf)
        return rotary_table(position, self.dims[1]), mask

    def step(self, qkv, state, seen):
        """(B, H V) of one more token's queries, keys and values (B, H (K + K + V)); seen: of its position."""
        (H, K, V), (table, mask) = self.dims, seen
        qk, v = (x.unflatten(-1, (-1, D))[:, :, None] for x, D in zip(qkv.split([2 * H * K, H * V], -1), (K, V)))
        q, k = turn(qk, table).split(H, 1) # (B, H, 1, K)
        state["k"].index_copy_(2, state["length"], k)
        state["v"].index_copy_(2, state["length"], v)
        o = F.scaled_dot_product_attention(q, state["k"], state["v"], attn_mask=mask)
        state["length"] += 1
        return o.flatten(1)

def rotate(x, past):
    """Rotary positions past, past + 1, ... of x (B, H, T, K): channels i, i + K/2 turn by 10,000^(-2i/K) a token."""
    return turn(x, rotary_table(torch.arange(past, past + x.shape[2], device=x.device), x.shape[3]))

def turn(x, table):
    cos, sin = table
    a, b = x.float().unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -2).flatten(-2).to(x.dtype)

# an operator of its own, which Inductor cannot look into: it would compute the sines anew for every element of q and k
@torch.library.custom_op("model::rotary_table", mutates_args=())
def rotary_table(positions: torch.Tensor, K: int) -> torch.Tensor:
    """cos and sin (2, T, K/2), fp32, of the angles of positions (T,)."""
    frequency = 10_000 ** (-torch.arange(0, K, 2, device=positions.device) / K)
    angle = torch.outer(positions, frequency)
    return torch.stack([angle.cos(), angle.sin()])

@rotary_table.register_fake
def _(positions, K):
    return torch.empty(2, len(positions), K // 2, device=positions.device)

def cached(state, name, x):
    """All of the sequence's keys (or values) so far; the buffer doubles as it fills, so a token costs O(1) copies."""
    length, total = state["length"], state["length"] + x.shape[2]
    if state[name].shape[2] < total:
        room = x.new_zeros(*x.shape[:2], max(total, 2 * length), x.shape[3])
        room[:, :, :length] = state[name][:, :, :length]
        state[name] = room
    state[name][:, :, length:total] = x
    return state[name][:, :, :total]

# ----------------------------------------------------------------------------------------------------------------------
# blocks and the model

class SwiGLU(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        # two products, not one of twice the width: as fast at these sizes, and backward need not join their gradients
        self.gate_proj = nn.Linear(cfg.n_embd, cfg.d_mlp, bias=False)
        self.value_proj = nn.Linear(cfg.n_embd, cfg.d_mlp, bias=False)
        self.out_proj = nn.Linear(cfg.d_mlp, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.out_proj(F.silu(self.gate_proj(x)) * self.value_proj(x))

MIXERS = {"gla": GLA, "gdn": GatedDeltaNet, "attention": Attention}

class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.mixer_norm, self.mixer = RMSNorm(cfg.n_embd, cfg.norm_eps), MIXERS[cfg.mixer](cfg)
        self.mlp_norm, self.mlp = RMSNorm(cfg.n_embd, cfg.norm_eps), SwiGLU(cfg)

    def forward(self, x, segment_ids=None, state=None):
        """
        Two terms of the residual stream, for LM.hidden to add: what enters the MLP and what leaves it. Were only their
        sum the output, compiled backward would form the first once more, and entangle the gradients of the two norms.
        """
        x = x + self.mixer(self.mixer_norm(x), segment_ids, state)
        return x, self.mlp(self.mlp_norm(x))

class LM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        assert cfg.mixer in MIXERS, f"mixer must be one of {', '.join(MIXERS)}, got {cfg.mixer!r}"
        assert cfg.mixer != "attention" or (cfg.conv_size == 0 and cfg.d_key % 2 == 0), \
            f"attention takes conv_size=0 and an even d_key, got conv_size={cfg.conv_size} and d_key={cfg.d_key}"
        self.cfg, self.checkpoint_blocks = cfg, False # True: recompute each block in backward, for memory
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd) # its weight is the output head too
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.apply(init_weights)
        expected, actual = cfg.expect_params, self.num_params()
        assert not expected or abs(actual / expected - 1) <= 0.01, \
            f"the model has {actual:,} parameters, over 1% off expect_params={expected:,}"

    def compile(self, **options):
        """torch.compile in place, block by block: one graph serves all layers, so that starting takes seconds."""
        for module in (*self.blocks, self.norm):
            module.compile(**options)

    def init_state(self, batch):
        """The state before the first token, for forward(state=...): a list with one dict a layer, updated in place."""
        return [block.mixer.init_state(batch, self.norm.weight.device) for block in self.blocks]

    def hidden(self, idx, segment_ids=None, state=None):
        """What the output head reads, (B, T, C), normalised. Arguments as in forward."""
        x = self.embed(idx)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type)) # the residual stream: half the memory and traffic of fp32
        for i, block in enumerate(self.blocks):
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x = torch.add(*checkpoint(block, x, segment_ids, use_reentrant=False))
            else:
                x = torch.add(*block(x, segment_ids, state and state[i]))
        return self.norm(x)

    def forward(self, idx, targets=None, segment_ids=None, state=None):
        """
        idx, targets, segment_ids: (B, T) integers, segment_ids non-decreasing. With targets, logits is None and loss
        the mean over all tokens; without, logits is (B, T, vocab_size) and loss None. With state, idx continues the
        sequences it holds.
        """
        x = self.hidden(idx, segment_ids, state)
        if targets is not None and x.is_cuda:
            import kernels
            return None, kernels.linear_cross_entropy(x, self.embed.weight, targets)
        logits = F.linear(x, self.embed.weight)
        if targets is None:
            return logits, None
        return None, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, token, state):
        """
        Logits (B, vocab_size) after one more token (B,) of each sequence, on a GPU, without gradients and of a model by
        sample.py's for_inference, whose blocks' norms have no gain: forward in seven launches a layer (kernels.py, "one
        token through a block"). Attention takes the state of Attention.fixed_state.
        """
        from kernels import gated_delta_rule_step, gla_step, linear_step, step_inputs
        x, eps = self.embed(token), self.cfg.norm_eps # (B, C)
        squares = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).square()
        if self.cfg.mixer == "attention":
            seen = self.blocks[0].mixer.seen(state[0], x.dtype)
        for block, past in zip(self.blocks, state):
            mixer, mlp, norm = block.mixer, block.mlp, (squares, eps)
            conv = (past["conv"], mixer.conv.weight) if "conv" in past else (None, None)
            if self.cfg.mixer == "attention":
                u = mixer.step(linear_step(x, mixer.in_proj, norm)[0], past, seen)
            else:
                p, _ = linear_step(x, mixer.in_proj, norm, beside=mixer.gate_proj)
                if self.cfg.mixer == "gla":
                    low = mixer.decay_proj.weight, mixer.decay_proj.bias
                    o = gla_step(*step_inputs(p, *mixer.dims, False, conv, low=low), past["S"])
                else:
                    gates = x, norm, mixer.ab_proj.weight, mixer.A_log, mixer.dt_bias
                    o = gated_delta_rule_step(*step_inputs(p, *mixer.dims, True, conv, gates=gates), past["S"])
                u = mixer.norm(o, p[:, -o[0].numel():].view_as(o)).flatten(1)
            x, squares = linear_step(u, mixer.out_proj, residual=x)
            h, _ = linear_step(x, mlp.gate_proj, (squares, eps), pair=mlp.value_proj)
            x, squares = linear_step(h, mlp.out_proj, residual=x)
        return linear_step(self.norm(x), self.embed)[0] # the head is the embedding too, so its norm keeps its gain

    def num_params(self):
        """Embeddings counted once: the output head is tied to them."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len):
        """
        Forward and backward of one token: 6 a weight that enters a matrix product (2 forward, 4 backward; the
        embedding lookup is none, the tied head is one), and 3 times the mixer's own: 2 KV a product with the state, one
        write and one read in GLA, a second read in the delta rule; in attention q k and P v over T/2 earlier tokens.
        """
        cfg = self.cfg
        H, K, V = cfg.n_head, cfg.d_key, cfg.d_value
        mixer = {"gla": 4 * K * V, "gdn": 6 * K * V, "attention": (K + V) * seq_len}[cfg.mixer]
        return 6 * sum(p.numel() for p in self.parameters() if p.ndim == 2) + 3 * cfg.n_layer * H * mixer

    def optim_groups(self, weight_decay, lr_ratio=0.0):
        """
        Matrices decay; norms, biases, decay parameters (A_log, dt_bias) and the few taps of convolutions do not. With
        lr_ratio, their learning rate over the others', the blocks' matrices are a group of their own, for Muon, with
        the "parts" of each: the rows of the matrices that are stacked in it.
        """
        linear = [m for m in self.blocks.modules() if isinstance(m, nn.Linear)] if lr_ratio else []
        inner, parts = [m.weight for m in linear], [getattr(m, "parts", [m.out_features]) for m in linear]
        decay = {m.weight for m in self.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
        rest = [p for p in self.parameters() if p not in decay]
        decay -= set(inner)
        decay = [p for p in self.parameters() if p in decay]
        assert len(inner + decay + rest) == len(list(self.parameters())), "a parameter is in no group or in two"
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        if lr_ratio:
            groups.append({"params": inner, "weight_decay": weight_decay, "lr_ratio": lr_ratio, "parts": parts})
        return groups

@torch.no_grad()
def init_weights(module):
    """
    Every parameter's first value, in fp32 whatever the default dtype; norm weights are made as ones. As in FLA's
    models, but for convolutions (there normal, std 0.02: values so small that the norm's eps counts) and exp(A_log)
    (there 0 to 16).
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, ShortConv):
        bound = module.weight.shape[1] ** -0.5
        nn.init.uniform_(module.weight, -bound, bound) # as nn.Conv1d
    elif isinstance(module, GatedDeltaNet):
        module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1, 16).log()) # decay rates of 1 to 16 per unit of dt
        dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
        module.dt_bias.copy_(dt.expm1().log()) # softplus(dt_bias) = dt in 0.001 to 0.1
