"""
Speed and memory on this machine: the operators, the training step, generation, and memory by length.

    python bench.py                                                   # all tables: 340M models on a GPU, tiny on a CPU
    python bench.py --what=kernels --json=kernels.jsonl               # or train, sample, memory; rows also as JSON
    python bench.py config/gla_340m.py --what=train --batch_size=16   # one config, changed as for train.py
    python bench.py --plot=loss.png --logs='out/*/log.jsonl'          # the curves of training runs

Times are medians with the 10th and 90th percentile, after a first call that is timed by itself (`first_s`: compilation
and tuning included). Peers run in the same process at equal terms: softmax attention (SDPA) always, FLA where it is
installed.
"""
import collections
import glob
import importlib.util
import json
import math
import os
import platform
import random
import re
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import config
import model as definitions
from model import LM
from sample import Decoder, choose, for_inference, prefill, state_bytes, weight_bytes
from train import TrainConfig, autocast, brief, peak_flops

@dataclass(frozen=True)
class BenchConfig(TrainConfig):
    what: str = "" # kernels, train, sample or memory; empty: all of them
    json: str = "" # file for the rows, one JSON object a line
    fla_configs: int = 4 # configurations that FLA's autotuners may try per kernel, 0: all, which takes minutes
    plot: str = "" # picture to draw from `logs`, instead of measuring
    logs: str = "out/*/log.jsonl"

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
MATRICES = torch.bfloat16 if CUDA else torch.float32
DTYPE = str(MATRICES).removeprefix("torch.") # for the tables

# B, T, H, K, V: the operators' shapes, and their peer's
SHAPES = {"gla": [(32, 2048, 4, 128, 256), (8, 8192, 4, 128, 256), (1, 65536, 4, 128, 256)],
          "gated_delta_rule": [(32, 2048, 6, 128, 256), (32, 2048, 8, 128, 128), (8, 8192, 6, 128, 256),
                               (1, 65536, 6, 128, 256), (1, 65536, 8, 128, 128)],
          "sdpa": [(32, 2048, 16, 64, 64), (8, 8192, 16, 64, 64), (1, 65536, 16, 64, 64)]}
if not CUDA:
    SHAPES = {"gla": [(2, 512, 2, 16, 32)], "gated_delta_rule": [(2, 512, 2, 16, 32)], "sdpa": [(2, 512, 4, 16, 16)]}

# ----------------------------------------------------------------------------------------------------------------------
# tables and clocks

class Report:
    """Prints tables row by row, and writes each row to a file as a line of JSON."""
    def __init__(self, path):
        try:
            self.file = open(path, "w") if path else None
        except OSError as error:
            sys.exit(f"--json={path}: cannot write the file: {error.strerror}")

    def table(self, name, title, columns):
        """`columns` is "key:format key:format ...", for format(); a key that a row lacks is printed as -."""
        self.name, self.columns = name, [column.split(":") for column in columns.split()]
        print("\n" + title + "\n" + " ".join(format(key, width(spec)) for key, spec in self.columns), flush=True)

    def row(self, **values):
        self.write({"table": self.name, **values})
        cells = [format("-", width(spec)) if values.get(key) is None else format(values[key], spec)
                 for key, spec in self.columns]
        print(" ".join(cells) + (f"  {values['error']}" if "error" in values else ""), flush=True)

    def write(self, values):
        if self.file:
            print(json.dumps(values), file=self.file, flush=True)

def width(spec):
    """>9.3f -> >9, for a heading"""
    return re.match(r"[<>]\d+", spec)[0]

def synchronize():
    if CUDA:
        torch.cuda.synchronize()

def seconds(f):
    synchronize()
    start = time.perf_counter()
    f()
    synchronize()
    return time.perf_counter() - start

def in_a_row(f, n):
    """Times in ms of n calls one after the other, as in a loop: the host may run ahead of the GPU."""
    def mark():
        if not CUDA:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    marks = [mark()]
    for _ in range(n):
        f()
        marks.append(mark())
    synchronize()
    return [a.elapsed_time(b) if CUDA else 1000 * (b - a) for a, b in zip(marks, marks[1:])]

def spread(times):
    median, p10, p90 = np.percentile(times, (50, 10, 90)).tolist()
    return {"ms": median, "p10": p10, "p90": p90}

def measure(f):
    """An operator's time in ms: on a GPU with a cold L2 cache."""
    first_s = seconds(f)
    if CUDA:
        from triton.testing import do_bench
        times = do_bench(f, warmup=50, rep=200, return_mode="all")
    else:
        times = in_a_row(f, min(50, max(10, int(1 / seconds(f)))))
    return {**spread(times), "first_s": first_s}

def captured(f):
    """f as one CUDA graph, whose time is the GPU's alone: in a training step, too, the host runs ahead."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay

def saved_bytes(f, given):
    """Bytes that f() keeps alive for its backward and as its result, without what it was given."""
    if CUDA:
        before = torch.cuda.memory_allocated()
        kept = f() # noqa: F841, alive while the memory is read
        return torch.cuda.memory_allocated() - before
    storages = {}
    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        pack(f())
    return sum(size for address, size in storages.items() if address not in {x.data_ptr() for x in given})

def ceilings(report):
    """What this machine can do: bytes/s of a copy (read + write), FLOP/s of a large matrix product."""
    n, m = (2**31, 8192) if CUDA else (2**26, 1024)
    x = torch.zeros(n, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    # a ceiling is what the machine can do, not what it does when shared
    copy = 2 * n / (measure(lambda: y.copy_(x))["p10"] / 1000)
    a, b = (torch.randn(m, m, device=DEVICE, dtype=MATRICES) for _ in range(2))
    matmul = 2 * m**3 / (measure(lambda: a @ b)["p10"] / 1000)
    print(f"measured ceilings: copy {copy / 1e9:,.0f} GB/s, {DTYPE} matrix product {matmul / 1e12:,.2f} TFLOP/s at "
          f"{m}^3")
    report.write({"table": "ceilings", "copy_gb_s": copy / 1e9, "matmul_tflops": matmul / 1e12, "dtype": DTYPE})
    return copy, matmul

def header(report):
    cores = f"CPU, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}"
    facts = {"device": torch.cuda.get_device_name() if CUDA else cores, "torch": torch.__version__,
             "python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("triton", "fla"):
        facts[name] = importlib.import_module(name).__version__ if importlib.util.find_spec(name) else None
    print(", ".join(v if k == "device" else f"{k} {v}" for k, v in facts.items() if v))
    report.write({"table": "machine", **facts})

# ----------------------------------------------------------------------------------------------------------------------
# kernels

def inputs(op, shape):
    """Leaves by the operator's argument names, gates and beta as at a layer's initialisation, q and k of unit norm."""
    B, T, H, K, V = shape
    rng = torch.Generator(DEVICE).manual_seed(0)
    def rand(*size):
        return torch.randn(*size, device=DEVICE, generator=rng)
    x = {"q": rand(B, T, H, K), "k": rand(B, T, H, K), "v": rand(B, T, H, V)}
    if op == "gla":
        x["g"] = F.logsigmoid(rand(B, T, H, K)) / 16
    if op == "gated_delta_rule":
        x["q"], x["k"] = F.normalize(x["q"], dim=-1), F.normalize(x["k"], dim=-1)
        x["g"] = -8 * F.softplus(rand(B, T, H) - 4.6) # A = 8, dt near 0.01
        x["beta"] = rand(B, T, H).sigmoid()
    if op == "sdpa":
        x = {name: y.transpose(1, 2) for name, y in x.items()}
    dtypes = {name: torch.float32 if name == "g" else MATRICES for name in x}
    return {name: y.to(dtypes[name]).contiguous().requires_grad_() for name, y in x.items()}

def operators(op, cfg):
    """(name, function of `inputs` that returns o) of ours and of its peers."""
    if op == "sdpa":
        for backend in [SDPBackend.FLASH_ATTENTION] + CUDA * [SDPBackend.CUDNN_ATTENTION]:
            def f(q, k, v, backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            yield "sdpa " + backend.name.lower().removesuffix("_attention"), f
        return
    if CUDA:
        import kernels
        yield op, lambda **x: getattr(kernels, op)(**x)[0]
    else:
        yield op + "_chunked", lambda **x: getattr(definitions, op + "_chunked")(**x)[0]
    if CUDA and importlib.util.find_spec("fla"):
        fla = import_fla(cfg.fla_configs)
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gla import chunk_gla
        peer = {"gla": chunk_gla, "gated_delta_rule": chunk_gated_delta_rule}[op]
        yield f"fla {fla.__version__}", lambda **x: peer(**x)[0]

def import_fla(n):
    """
    flash-linear-attention to be timed. Triton's autotuners try n configurations from here on (0: all), always the same
    ones; ours have none. And where FLA refuses its gated-delta backward, as wrong on Hopper with Triton 3.4 to 3.7.0,
    it is let through: its time is wanted here, not its result.
    """
    import fla
    from triton.runtime.autotuner import Autotuner
    if n and not hasattr(Autotuner, "uncut"):
        Autotuner.uncut = Autotuner.prune_configs
        def prune_configs(self, kwargs):
            configs = list(self.uncut(kwargs))
            return random.Random(0).sample(configs, min(n, len(configs)))
        Autotuner.prune_configs = prune_configs
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    return fla

def bench_kernels(report, cfgs, copy, matmul):
    report.table("kernels", f"""operators, B T H K V, {DTYPE}; on a GPU as one CUDA graph, eager: called from Python.
Bytes: every input, output and gradient once a pass, copy: their share of the measured copy speed. FLOPs: of the
recurrence (attention: causal), backward twice the forward, matmul: share of the measured matrix product. saved:
allocated after forward less before, output included. ratio: time over that of our operator (SDPA: over gla's at the
same B and T)""",
                 "op:<24 shape:<18 pass:<7 ms:>8.3f p10:>8.3f p90:>8.3f eager:>8.3f first_s:>7.2f gb_s:>6.1f"
                 " copy:>5.0% tflops:>7.3f matmul:>6.1% saved_gb:>8.4f ratio:>6.2f")
    cfg, ours = next(iter(cfgs.values())), {} # our ms by shape and pass
    for op in SHAPES:
        for shape in SHAPES[op]:
            x = inputs(op, shape)
            for name, f in operators(op, cfg):
                for row in operator_rows(op, shape, name, f, x):
                    if "ms" in row:
                        same = (op, *shape) if op != "sdpa" else ("gla", *shape[:2])
                        reference = ours.setdefault((*same, row["pass"]), row["ms"]) # ours comes first
                        ours.setdefault((op, *shape[:2], row["pass"]), row["ms"])
                        rate, work = row["bytes"] * 1000 / row["ms"], row["flops"] * 1000 / row["ms"]
                        row |= {"gb_s": rate / 1e9, "copy": rate / copy, "tflops": work / 1e12, "matmul": work / matmul,
                                "ratio": row["ms"] / reference}
                    report.row(op=name, shape=" ".join(map(str, shape)), dtype=DTYPE, **row)
            if CUDA and op != "sdpa":
                step_row(report, op, shape, copy)

def operator_rows(op, shape, name, f, x):
    """fwd without and with backward; a peer that refuses gives its sentence instead of a time."""
    B, T, H, K, V = shape
    flops = B * T * H * {"gla": 4 * K * V, "gated_delta_rule": 6 * K * V, "sdpa": (K + V) * T}[op]
    read = sum(y.numel() * y.element_size() for y in x.values())
    o_bytes = x["v"].numel() * x["v"].element_size()
    do = torch.randn_like(x["v"])
    def forward():
        with torch.no_grad():
            f(**x)
    def both():
        torch.autograd.grad(f(**x), list(x.values()), do)
    passes = ("fwd", forward, read + o_bytes, 1), ("fwd+bwd", both, 3 * read + 2 * o_bytes, 3)
    for label, run, nbytes, times in passes:
        row = {"pass": label, "bytes": nbytes, "flops": times * flops}
        try:
            row |= measure(run)
            if CUDA:
                row |= {**measure(captured(run)), "eager": row["ms"], "first_s": row["first_s"]}
            if label == "fwd+bwd":
                row["saved_gb"] = saved_bytes(lambda: f(**x), x.values()) / 1e9
        except Exception as error: # of a peer; ours has no excuse
            if not name.startswith(("fla", "sdpa")):
                raise
            row["error"] = brief(error)
        yield row

def step_row(report, op, shape, copy):
    """One token for each of B sequences; bytes: the states read and written once."""
    import kernels
    B, T, H, K, V = shape
    x = {name: y.detach()[:, 0].contiguous() for name, y in inputs(op, (B, 1, H, K, V)).items()}
    state = torch.zeros(B, H, V, K, device=DEVICE).transpose(2, 3)
    step = getattr(kernels, op + "_step")
    first_s = seconds(lambda: step(**x, state=state))
    row = measure(captured(lambda: step(**x, state=state)))
    nbytes = 2 * state.numel() * state.element_size()
    rate = nbytes / (row["ms"] / 1000)
    row |= {"pass": "step", "first_s": first_s, "bytes": nbytes, "gb_s": rate / 1e9, "copy": rate / copy}
    report.row(op=op + "_step", shape=f"{B} 1 {H} {K} {V}", dtype=DTYPE, **row)

# ----------------------------------------------------------------------------------------------------------------------
# the training step

def build(cfg, device=DEVICE):
    torch.manual_seed(0)
    try:
        with torch.device(device):
            return LM(cfg)
    except AssertionError as error:
        sys.exit(str(error))

def fla_model(cfg):
    """FLA's model of the config's sizes, which is run as FLA's users run it: eager."""
    fla = import_fla(cfg.fla_configs)
    from transformers import AutoModelForCausalLM
    H, K, V = cfg.n_head, cfg.d_key, cfg.d_value
    sizes = dict(hidden_size=cfg.n_embd, num_heads=H, num_hidden_layers=cfg.n_layer, intermediate_size=cfg.d_mlp,
                 vocab_size=cfg.vocab_size, tie_word_embeddings=True, use_cache=False)
    if cfg.mixer == "gla":
        fla_cfg = fla.models.GLAConfig(**sizes, expand_k=H * K / cfg.n_embd, expand_v=H * V / cfg.n_embd)
    else:
        fla_cfg = fla.models.GatedDeltaNetConfig(**sizes, head_dim=K, expand_v=V / K, conv_size=cfg.conv_size)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(fla_cfg).to(DEVICE)

def training_step(cfg, B, T, compiled, peer=False):
    """
    train.py's step, by AdamW alone, on B random rows of T tokens, as a function; and its model, or FLA's of the same
    sizes (`peer`). Documents are about 1,000 tokens; FLA's model gets no boundaries.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(not peer, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    raw = fla_model(cfg) if peer else build(cfg)
    raw.checkpoint_blocks = cfg.checkpoint_blocks
    groups = raw.parameters() if peer else raw.optim_groups(cfg.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), fused=True)
    if compiled:
        raw.compile(fullgraph=True, dynamic=False)
    idx, targets = torch.randint(cfg.vocab_size, (2, B, T), device=DEVICE)
    ids = (torch.rand(B, T, device=DEVICE) < 1e-3).cumsum(1, dtype=torch.int32) if cfg.reset_at_eot else None
    def step():
        with autocast(DEVICE):
            loss = raw(idx, labels=idx).loss if peer else raw(idx, targets, ids)[1]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), cfg.grad_clip or math.inf)
        optimizer.found_inf = (~torch.isfinite(loss.detach() + norm)).float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step, raw

KINDS = { # in this order: the first that fits; of mixers ours, FLA's and attention
    "mixer kernels": r"^(gla|gdn|conv|chunk|causal_conv1d|l2norm|prepare_wy|recompute_w|merge_16x16|solve_tril)_"
                     r"|flash|fmha|attention",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas",
    "optimizer": r"adam|multi_tensor|lpnorm|foreach",
    "loss": r"nll_loss|cross_entropy|log_softmax|softmax"}

def kind_of(kernel):
    kinds = (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(kinds, "norms, elementwise")

def breakdown(step, ms, n=3):
    """ms of a step by kind of GPU kernel; idle is what is left of the step's time `ms`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(n):
            step()
        torch.cuda.synchronize()
    spent = collections.Counter()
    for event in profile.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[kind_of(event.key)] += event.self_device_time_total / 1000 / n
    return {**spent, "idle": max(0.0, ms - sum(spent.values()))}

def bench_train(report, cfgs, copy, matmul):
    peak = peak_flops(torch.cuda.get_device_name()) if CUDA else None
    cfg = next(iter(cfgs.values()))
    report.table("train", f"""training step: forward, backward, clipping, fused AdamW on fp32 parameters; random tokens;
products in {DTYPE}. mfu: FLOPs over the data sheet's {(peak or 0) / 1e12:,.0f} TFLOP/s (0: not known), matmul: over
the measured ceiling; ratio: our tok/s over the row's. FLA's models, where installed, have the same sizes, and
autotuners that try {cfg.fla_configs} configurations""",
                 "model:<16 params:>11,d B:>3d T:>6d ms:>8.2f p10:>8.2f p90:>8.2f first_s:>7.1f tok_s:>8,.0f"
                 " tflops:>7.3f mfu:>6.1% matmul:>6.1% peak_gb:>7.2f ratio:>6.2f")
    parts, ours = [], {} # ours: tok/s by mixer
    peers = [(f"fla {cfg.mixer}", cfg, True) for cfg in cfgs.values()
             if CUDA and cfg.mixer != "attention" and importlib.util.find_spec("fla")]
    for label, cfg, peer in [(label, cfg, False) for label, cfg in cfgs.items()] + peers:
        B, T, compiled = cfg.batch_size, cfg.seq_len, cfg.compile and not peer
        row = {"model": label, "mixer": cfg.mixer, "B": B, "T": T, "dtype": DTYPE, "compile": compiled}
        try:
            if CUDA:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step, raw = training_step(cfg, B, T, compiled, peer)
            first_s = seconds(step)
            warm = max(seconds(step) for _ in range(2))
            times = in_a_row(step, min(30, max(3, int((5 if CUDA else 3) / warm))))
        except torch.OutOfMemoryError:
            report.row(**row, error="out of memory")
            continue
        except Exception as error: # of a peer; ours has no excuse
            if not peer:
                raise
            report.row(**row, error=brief(error))
            continue
        rate = B * T / np.median(times) * 1000 # tokens a second
        flops = rate * build(cfg, "meta").flops_per_token(T) # ours count for the peer, its model is the same
        report.row(**row, params=sum(p.numel() for p in raw.parameters()), **spread(times), first_s=first_s, tok_s=rate,
                   tflops=flops / 1e12, mfu=peak and flops / peak, matmul=flops / matmul,
                   peak_gb=torch.cuda.max_memory_allocated() / 1e9 if CUDA else None,
                   ratio=ours.setdefault(cfg.mixer, rate) / rate)
        if CUDA:
            parts.append((label, breakdown(step, np.median(times))))
        del step, raw
    if parts:
        kinds = [*KINDS, "norms, elementwise", "idle"]
        report.table("breakdown", "the same steps by kind of kernel, ms (" + "; ".join(kinds) + ")",
                     "model:<16 " + " ".join(f"{kind.replace(' ', '_')}:>{len(kind) + 1}.2f" for kind in kinds))
        for label, spent in parts:
            report.row(model=label, **{kind.replace(" ", "_"): spent.get(kind, 0.0) for kind in kinds})

# ----------------------------------------------------------------------------------------------------------------------
# generation

DRAW = 0.8, 200, 1.0 # temperature, top_k, top_p

def bench_sample(report, cfgs, copy, matmul):
    report.table("sample", f"""generation, matrices in {DTYPE} or int8, drawing with top_k=200 included. prefill:
reading `context` tokens of a prompt; decode: a token for each of `batch` sequences after `context` tokens, on a GPU as
one CUDA graph (FLA: kernel by kernel, as it generates); weights: of the model; state: of a sequence (attention: with
room for `context` + 300 tokens)""",
                 "model:<22 pass:<8 batch:>6d context:>8d ms:>8.3f p10:>8.3f p90:>8.3f first_s:>7.2f tok_s:>9,.0f"
                 " weights_mb:>10.2f state_mb:>9.3f")
    short, long, many, n = (100, 100_000, 64, 131_072) if CUDA else (16, 1024, 8, 1024)
    for label, cfg in cfgs.items():
        tokens = torch.randint(cfg.vocab_size, (1, n), device=DEVICE)
        for int8 in (False, True):
            model = for_inference(build(cfg), DEVICE.type, int8)
            row = {"model": label + " int8" * int8, "mixer": cfg.mixer, "dtype": "int8" if int8 else DTYPE,
                   "weights_mb": weight_bytes(model) / 1e6}
            first_s = seconds(lambda: prefill(model, tokens))
            times = [1000 * seconds(lambda: prefill(model, tokens)) for _ in range(3)]
            report.row(**row, **{"pass": "prefill"}, batch=1, context=n, **spread(times), first_s=first_s,
                       tok_s=1000 * n / np.median(times))
            for batch, context in ((1, short), (many, short)) + ((1, long),) * (not int8):
                decoders, start = [], prefill(model, tokens[:, :context])
                first_s = seconds(lambda: decoders.append(Decoder(model, batch, cfg.vocab_size, *DRAW, context + 300)))
                decoders[0].start(*start)
                report.row(**row, **decode_row(decoders[0].step, batch, context), first_s=first_s,
                           state_mb=state_bytes(decoders[0].state) / batch / 1e6)
            del model, decoders, start
        if CUDA and cfg.mixer != "attention" and importlib.util.find_spec("fla"):
            row = {"model": label + " fla", "mixer": cfg.mixer, "dtype": DTYPE}
            try:
                for batch in (1, many):
                    steps = []
                    first_s = seconds(lambda: steps.append(fla_step(cfg, tokens[:, :short].expand(batch, -1))))
                    report.row(**row, **decode_row(steps[0], batch, short), first_s=first_s)
            except Exception as error: # of a peer
                report.row(**row, **{"pass": "decode"}, error=brief(error))

def decode_row(step, batch, context):
    in_a_row(step, 5)
    times = in_a_row(step, 200 if CUDA else 30)
    tok_s = 1000 * batch / np.median(times)
    return {"pass": "decode", "batch": batch, "context": context, **spread(times), "tok_s": tok_s}

@torch.no_grad()
def fla_step(cfg, tokens):
    """FLA's model of cfg's shape after `tokens` (B, T): a function that draws one more, with its cache."""
    model = fla_model(cfg).to(MATRICES).eval()
    out = model(tokens, use_cache=True, logits_to_keep=1)
    token = choose(out.logits[:, -1], *DRAW)
    @torch.no_grad()
    def step():
        again = model(token, past_key_values=out.past_key_values, use_cache=True)
        token.copy_(choose(again.logits[:, -1], *DRAW))
    return step

# ----------------------------------------------------------------------------------------------------------------------
# memory by length

def bench_memory(report, cfgs, copy, matmul):
    report.table("memory", """memory of one sequence of T tokens, not compiled. peak_gb: of a training step on a GPU,
parameters and moments included; saved_gb: kept between forward and backward; state_mb: what generation carries on
after T tokens""",
                 "model:<16 T:>8d peak_gb:>9.3f saved_gb:>9.4f state_mb:>9.3f")
    for label, cfg in cfgs.items():
        for T in [2**i for i in (range(10, 18) if CUDA else range(7, 11))]:
            row = {"model": label, "mixer": cfg.mixer, "B": 1, "T": T, "checkpoint_blocks": cfg.checkpoint_blocks}
            try:
                if CUDA:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                step, raw = training_step(cfg, 1, T, compiled=False)
                step()
                if CUDA:
                    step() # the moments exist now
                    row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                idx = torch.zeros(1, T, dtype=torch.int64, device=DEVICE)
                with autocast(DEVICE):
                    row["saved_gb"] = saved_bytes(lambda: raw(idx, idx)[1], [idx, *raw.parameters()]) / 1e9
                row["state_mb"] = state_bytes(prefill(for_inference(raw, DEVICE.type), idx)[0]) / 1e6
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            report.row(**row)
            step = raw = None

# ----------------------------------------------------------------------------------------------------------------------
# curves

def plot(path, pattern):
    """
    Of every log.jsonl that `pattern` matches: training loss (line) and validation loss (dots) over tokens, and, where
    train.py --eval_only=True has added it, validation loss by position.
    """
    logs = sorted(glob.glob(pattern, recursive=True))
    if not logs:
        sys.exit(f"--logs={pattern}: no such file")
    if not importlib.util.find_spec("matplotlib"):
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    figure, (axes, by_position) = plt.subplots(1, 2, figsize=(14, 5))
    for log in logs:
        try:
            with open(log) as f:
                records = [r for r in map(json.loads, f) if "step" in r] # the first line holds the config
        except (OSError, ValueError, TypeError) as error:
            sys.exit(f"{log}: not a log.jsonl of train.py ({brief(error)})")
        def curve(key): # null is a number that was not finite
            return np.array([(r["tokens"] / 1e6, r[key]) for r in records if r.get(key) is not None]).reshape(-1, 2).T
        name = os.path.basename(os.path.dirname(log)) or log
        line, = axes.plot(*curve("loss"), linewidth=1, label=name)
        axes.plot(*curve("val_loss"), "o", color=line.get_color())
        for points in [r["val_loss_by_position"] for r in records if r.get("val_loss_by_position")][-1:]: # the newest
            ends, losses, _ = np.array(points, dtype=float).T # null becomes NaN, a gap
            by_position.plot(ends, losses, "o-", color=line.get_color())
    axes.set(xlabel="tokens, millions", ylabel="loss, nats a token (dots: validation)")
    by_position.set(xlabel="position up to, tokens", ylabel="validation loss, nats a token", xscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    by_position.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        sys.exit(f"--plot={path}: cannot write the picture: {brief(error)}")
    print(f"{len(logs)} runs drawn to {path}")

# ----------------------------------------------------------------------------------------------------------------------

BENCHES = {"kernels": bench_kernels, "train": bench_train, "sample": bench_sample, "memory": bench_memory}

def models(argv):
    """The configs to measure by name: the one on the command line, or the machine's usual three with its flags."""
    if any(not arg.startswith("--") for arg in argv):
        cfg = config.load(BenchConfig, argv)
        return {os.path.splitext(os.path.basename(next(a for a in argv if not a.startswith("--"))))[0]: cfg}
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "config")
    if CUDA:
        return {name: config.load(BenchConfig, [f"{folder}/{name}.py", *argv])
                for name in ("gla_340m", "gdn_340m", "transformer_340m")}
    changes = {"gla": ["--conv_size=0"], "gdn": ["--conv_size=4"],
               "attention": ["--conv_size=0", "--reset_at_eot=False"]}
    cfgs = {mixer: config.load(BenchConfig, [f"{folder}/tiny.py", f"--mixer={mixer}", *flags, *argv])
            for mixer, flags in changes.items()}
    return {f"tiny {mixer}": cfg for mixer, cfg in cfgs.items() if cfg.mixer == mixer or cfg.mixer not in changes}

def main():
    cfgs = models(sys.argv[1:])
    cfg = next(iter(cfgs.values()))
    if cfg.plot:
        return plot(cfg.plot, cfg.logs)
    for key in "n_layer n_head n_embd d_key d_value d_mlp vocab_size seq_len batch_size".split():
        if getattr(cfg, key) < 1:
            sys.exit(f"--{key}={getattr(cfg, key)}: at least 1")
    if cfg.what not in ("", *BENCHES):
        sys.exit(f"--what={cfg.what}: one of {', '.join(BENCHES)}, or nothing for all of them")
    report = Report(cfg.json)
    header(report)
    copy, matmul = ceilings(report)
    for name in [cfg.what] if cfg.what else BENCHES:
        BENCHES[name](report, cfgs, copy, matmul)

if __name__ == "__main__":
    main()
