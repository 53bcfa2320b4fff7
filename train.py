"""
Trains a language model on the shards of prepare.py; the whole of it in this file.

    python train.py config/tiny.py                                        # 2 CPU cores, two minutes
    python train.py config/gla_340m.py                                    # one GPU: 8 micro-steps instead of 8 GPUs
    torchrun --standalone --nproc_per_node=8 train.py config/gla_340m.py  # one node of 8 GPUs
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/gla_340m.py
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 train.py config/gla_340m.py --resume=True
    python train.py config/tiny.py --eval_only=True                       # validation loss of the newest checkpoint

A config file and --key=value flags override TrainConfig, left to right. --resume=True continues from the newest
checkpoint in out_dir and starts at step 0 where there is none, so one command serves the first start and every restart.
SIGTERM or Ctrl-C finishes the step, saves and exits 0. The numbers go to the terminal, out_dir/log.jsonl and, if asked,
wandb.
"""
import bisect
import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from collections import defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL) # Ctrl-C ends it at once, until there is a step to save

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional # noqa: F401, ahead of the process group, which its defaults would keep alive
import torch.nn.functional as F
from torch.distributed.rendezvous import rendezvous

import config
from model import LM, ModelConfig

@dataclass(frozen=True)
class TrainConfig(ModelConfig):
    # data
    data_dir: str = "data/stdlib-bytes" # a folder made by prepare.py
    seq_len: int = 2048 # tokens of a row
    seq_len_start: int = 0 # rows are cut to this length at first, doubling to seq_len over the warm-up, 0: off
    reset_at_eot: bool = True # documents in one row do not see each other
    seed: int = 1337 # of the first weights and of the data order
    zero_out: bool = False # the blocks' output projections start at 0: a block adds nothing at first
    # batch; accumulation follows from it: batch_size and the number of GPUs change memory and speed, not the result
    batch_size: int = 32 # rows per GPU per micro-step
    batch_tokens: int = 524_288 # tokens per optimizer step, all GPUs together
    total_tokens: int = 15_000_000_000 # of the schedule
    max_steps: int = 0 # stop here without changing the schedule, 0: at total_tokens
    # optimizer
    learning_rate: float = 1e-3 # after warm-up
    muon_lr: float = 0.0 # of the blocks' matrices, by Muon, on the same schedule: min_lr scales alike; 0: all by AdamW
    min_lr: float = 1e-4 # at the last step
    warmup_tokens: int = 500_000_000
    schedule: str = "cosine" # or "wsd": warm-up, stable, linear decay
    decay_frac: float = 0.2 # of the steps that decay under wsd
    weight_decay: float = 0.1
    beta1: float = 0.9 # of AdamW
    beta2: float = 0.95
    grad_clip: float = 1.0 # of the global norm, 0: off
    # evaluation, logs and checkpoints; intervals in steps, 0: at the end only
    eval_interval: int = 1000
    eval_tokens: int = 10_485_760 # taken evenly over the validation set
    eval_only: bool = False # evaluate the newest checkpoint and stop
    log_interval: int = 10
    save_interval: int = 1000
    keep: int = 2 # newest checkpoints to keep, 0: all
    out_dir: str = "out/default"
    resume: bool = False
    wandb: bool = False
    wandb_project: str = "linear-attention"
    # speed and memory
    compile: bool = True
    checkpoint_blocks: bool = False # recompute each block in backward: less memory, about a third more time

    @property
    def steps(self): # of the schedule
        return self.total_tokens // self.batch_tokens

    @property
    def warmup_steps(self):
        return self.warmup_tokens // self.batch_tokens

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12} # bf16, dense, of the SXM boards; others have no MFU

def peak_flops(name):
    """PEAK_FLOPS of a device by its full name, None where it is not listed."""
    return next((v for k, v in PEAK_FLOPS.items() if re.search(rf"\b{k}\b", name)), None)

def brief(error):
    """The first line of what an error says, its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

def check(cfg, world):
    """Exits with one sentence where the settings cannot work."""
    positive = ("n_layer n_head n_embd d_key d_value d_mlp vocab_size seq_len batch_size batch_tokens total_tokens "
                "learning_rate eval_tokens log_interval")
    natural = ("conv_size norm_eps expect_params seq_len_start seed max_steps muon_lr min_lr warmup_tokens "
               "weight_decay beta1 beta2 grad_clip eval_interval save_interval keep")
    for key in (positive + " " + natural).split():
        value = getattr(cfg, key)
        if not (0 <= value < math.inf) or (value == 0 and key in positive.split()):
            sys.exit(f"{key} must be {'above 0' if key in positive.split() else '0 or more'}, got {value}")
    micro_batch = cfg.batch_size * cfg.seq_len * world # tokens of a micro-step
    start, steps = cfg.seq_len_start, cfg.steps
    for wrong, sentence in (
        (cfg.schedule not in ("cosine", "wsd"), f"schedule must be cosine or wsd, got {cfg.schedule!r}"),
        (not 0 <= cfg.decay_frac <= 1, f"decay_frac must be from 0 to 1, got {cfg.decay_frac}"),
        (max(cfg.beta1, cfg.beta2) >= 1, f"beta1 and beta2 must be below 1, got {cfg.beta1} and {cfg.beta2}"),
        (cfg.seed >= 2**32, f"seed must be below 2**32, got {cfg.seed}"),
        (not cfg.eval_only and cfg.batch_tokens % micro_batch,
         f"batch_tokens={cfg.batch_tokens} is not a multiple of batch_size * seq_len * ranks = {cfg.batch_size} * "
         f"{cfg.seq_len} * {world} = {micro_batch}: change " +
         ("batch_tokens" if cfg.batch_tokens % (cfg.seq_len * world) else "batch_size or batch_tokens")),
        (steps == 0, f"total_tokens={cfg.total_tokens} is less than one step of batch_tokens={cfg.batch_tokens}"),
        (cfg.warmup_steps >= max(steps, 1), f"warmup_tokens={cfg.warmup_tokens} leaves nothing of total_tokens="
         f"{cfg.total_tokens}: lower warmup_tokens"),
        (start and start not in [cfg.seq_len >> i for i in range(32) if cfg.seq_len % (1 << i) == 0],
         f"seq_len_start={start} must be seq_len={cfg.seq_len} halved some number of times, or 0"),
        (start and start < cfg.seq_len and cfg.warmup_tokens < cfg.batch_tokens,
         f"seq_len_start={start} grows over the warm-up, and warmup_tokens={cfg.warmup_tokens} is less than a step"),
        (cfg.mixer == "attention" and cfg.reset_at_eot,
         "attention does not stop at a document's start: set reset_at_eot=False"),
    ):
        if wrong:
            sys.exit(sentence)

def get_lr(cfg, step):
    """Learning rate of step 0, 1, ...: linear warm-up, learning_rate at its end, min_lr at the last step."""
    steps, warmup = cfg.steps, cfg.warmup_steps
    if step < warmup:
        return cfg.learning_rate * (step + 1) / (warmup + 1)
    decay = steps - 1 - warmup # steps
    if cfg.schedule == "wsd":
        decay = min(decay, round(cfg.decay_frac * steps))
    left = min(1.0, (steps - 1 - step) / decay) if decay else 1.0 # of the decay: 1 before it, 0 at the last step
    share = left if cfg.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return share * cfg.learning_rate + (1 - share) * cfg.min_lr

def get_seq_len(cfg, step):
    """Tokens a row is cut to at a step: seq_len_start, doubling in equal parts of the warm-up."""
    if not cfg.seq_len_start:
        return cfg.seq_len
    doublings = (cfg.seq_len // cfg.seq_len_start).bit_length() - 1
    return cfg.seq_len_start << (step * doublings // cfg.warmup_steps if step < cfg.warmup_steps else doublings)

# ----------------------------------------------------------------------------------------------------------------------
# the optimizer
#
# Muon moves a matrix by its momentum with every singular value set to 1, so that no direction in it learns slower than
# another, times 0.2 sqrt(larger side): elements of 0.2 in the root mean square, about those of AdamW's step, so that
# learning rate and weight decay may be the same for both (arXiv:2502.16982).

MUON_MOMENTUM = 0.95
# s -> a s + b s^3 + c s^5, one after the other, takes 0.001 <= s <= 1 to 0.84 to 1.13 and any s above 1.01 far away
# (Polar Express, arXiv:2505.16932, with its margin of 1.01 for the rounding to bf16)
NEWTON_SCHULZ = ((8.2052, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.525),
                 (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985))

def orthogonalize(x):
    """U V^T, nearly, of each matrix U S V^T of x (N, m, n) with m <= n, in x's dtype."""
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / (1.02 * norm + 1e-12)).to(x.dtype) # 1.02: s stays below 1 however it rounds
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT # (N, m, m)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x

class Muon(torch.optim.AdamW):
    """AdamW, but Muon for a group with "parts" (LM.optim_groups). Both leave all as it is where found_inf is 1."""
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if "parts" in group:
                self.muon_step(group)
        super().step() # of the parameters that still have a gradient

    def muon_step(self, group):
        params, lr, kept = group["params"], group["lr"] * group["lr_ratio"], 1 - self.found_inf
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # on a GPU always as many matrices at once, as cuBLAS chooses by their number: any number of ranks gets the same
        # bits. 12, as each product costs the host 60 us: at 340M 40 ms in all, by threes 131, one by one 303 (H200)
        dtype, together = (torch.bfloat16, 12) if kept.is_cuda else (torch.float32, 1)
        for p in params:
            if not self.state[p]: # AdamW counts the steps too, and looks for their number when it loads
                self.state[p] = {"step": p.new_zeros(()), "momentum": torch.zeros_like(p)}
        steps, momenta = ([self.state[p][key] for p in params] for key in ("step", "momentum"))
        # in a dropped step the momentum takes the gradient's place: finite, and its mean with itself is itself
        updates = [torch.where(kept > 0, p.grad, m) for p, m in zip(params, momenta)]
        torch._foreach_add_(steps, kept)
        torch._foreach_lerp_(momenta, updates, 1 - MUON_MOMENTUM)
        torch._foreach_lerp_(updates, momenta, MUON_MOMENTUM) # Nesterov's
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"] * kept)
        shapes = defaultdict(list) # the matrices of a shape and their updates
        for p, update, rows in zip(params, updates, group["parts"]):
            p.grad = None
            for pair in zip(p.split(rows), update.split(rows)):
                wide = [x if x.shape[0] <= x.shape[1] else x.mT for x in pair]
                shapes[wide[0].shape].append(wide)
        for (m, n), pairs in shapes.items():
            share = math.ceil(len(pairs) / world / together) * together # a rank's, padded by matrices of 0
            x = torch.zeros(share, m, n, dtype=dtype, device=kept.device)
            for row, (_, update) in zip(x, pairs[rank * share:(rank + 1) * share]):
                row.copy_(update)
            for y in x.split(together):
                torch.mul(orthogonalize(y), kept, out=y)
            if world > 1:
                mine, x = x, x.new_empty(world * share, m, n)
                dist.all_gather(list(x.split(share)), mine)
            for (p, _), update in zip(pairs, x):
                p.add_(update, alpha=-lr * 0.2 * n**0.5)

# ----------------------------------------------------------------------------------------------------------------------
# data
#
# A shard of n tokens holds (n - 1) // seq_len rows; row r is its tokens r * seq_len to (r + 1) * seq_len inclusive: a
# row's last target is the next row's first input, so every token is a target once. Rows are numbered through all
# shards, and training takes them in a seeded order, a new one each epoch.

Split = namedtuple("Split", "paths first eot") # first[s]: number of shard s's first row; first[-1]: of all rows

def open_data(cfg):
    """meta.json and the two splits of data_dir, {"train": Split, "val": Split}."""
    path = os.path.join(cfg.data_dir, "meta.json")
    try:
        with open(path) as f:
            meta = json.load(f)
        missing = {"tokenizer", "vocab_size", "eot", "shards"} - set(meta)
    except FileNotFoundError:
        sys.exit(f"{path} is missing: make {cfg.data_dir} with prepare.py first, which writes it last")
    except OSError as error:
        sys.exit(f"{path} cannot be read ({error.strerror}): set data_dir to a folder made with prepare.py")
    except (ValueError, TypeError):
        missing = True
    if missing:
        sys.exit(f"{path} is not prepare.py's: make {cfg.data_dir} again with it")
    if meta["vocab_size"] > cfg.vocab_size:
        sys.exit(f"{cfg.data_dir} has ids up to {meta['vocab_size'] - 1} ({meta['tokenizer']}), the model vocab_size="
                 f"{cfg.vocab_size}: set vocab_size to {-meta['vocab_size'] // 128 * -128}")
    splits = {name: open_split(cfg, meta, name) for name in ("train", "val")}
    for name, split in splits.items():
        if split.first[-1] == 0:
            sys.exit(f"{cfg.data_dir} has no {name} row of seq_len + 1 = {cfg.seq_len + 1} tokens: lower seq_len or "
                     "prepare more")
    return meta, splits

def open_split(cfg, meta, name):
    """The Split of the train or val shards in rows of cfg.seq_len, which may be none."""
    shards = sorted(file for file in meta["shards"] if file.startswith(name))
    rows = [max(0, meta["shards"][file]["tokens"] - 1) // cfg.seq_len for file in shards]
    paths = [os.path.join(cfg.data_dir, file) for file in shards]
    return Split(paths, [sum(rows[:i]) for i in range(len(rows) + 1)], meta["eot"])

def verify_shards(folder, shards, threads):
    """Exits naming the first of `shards`, items of meta.json's, that is not the file prepare.py wrote."""
    def fault(item):
        path, shard = os.path.join(folder, item[0]), item[1]
        try:
            if os.path.getsize(path) != 2 * shard["tokens"]:
                return f"{path} is {os.path.getsize(path)} bytes long, not {2 * shard['tokens']}"
            digest = hashlib.sha256()
            with open(path, "rb") as f:
                while block := f.read(1 << 24):
                    digest.update(block)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        same = digest.hexdigest() == shard["sha256"]
        return None if same else f"{path} is altered, its sha256 is not the one in meta.json"

    with ThreadPoolExecutor(threads) as pool: # hashing releases Python's lock
        for sentence in filter(None, pool.map(fault, shards)):
            sys.exit(f"{sentence}: restore it, or delete {folder} and run prepare.py again")

def read_rows(split, rows, seq_len):
    """Rows by number, (len(rows), seq_len + 1) int64. Plain reads: a memory map would count the whole set as ours."""
    out = np.empty((len(rows), seq_len + 1), dtype=np.int64)
    for i, row in enumerate(rows):
        s = bisect.bisect_right(split.first, row) - 1
        start = (row - split.first[s]) * seq_len
        out[i] = np.fromfile(split.paths[s], dtype="<u2", count=seq_len + 1, offset=2 * start)
    return torch.from_numpy(out)

@functools.lru_cache(maxsize=2) # a step may lie in two epochs
def row_order(seed, epoch, n):
    return np.random.RandomState([seed, epoch]).permutation(n) # RandomState: the same in every version of numpy

def train_rows(cfg, n, step, micro_step, rank, world):
    """The row numbers, of n, of a micro-step on a rank; those of all ranks and micro-steps make the global batch."""
    first = step * (cfg.batch_tokens // cfg.seq_len) + (micro_step * world + rank) * cfg.batch_size
    return [int(row_order(cfg.seed, i // n, n)[i % n]) for i in range(first, first + cfg.batch_size)]

def get_batch(cfg, split, rows, T, pin=False):
    """idx and targets (B, T) int64, segment_ids (B, T) int32 or None; rows longer than T are cut into pieces of T."""
    tokens = read_rows(split, rows, cfg.seq_len)
    idx, targets = tokens[:, :-1].clone().reshape(-1, T), tokens[:, 1:].clone().reshape(-1, T)
    ids = (idx == split.eot).cumsum(1, dtype=torch.int32) if cfg.reset_at_eot else None # a document starts with eot
    return [x if x is None or not pin else x.pin_memory() for x in (idx, targets, ids)]

def to_device(batch, device):
    return [x if x is None else x.to(device, non_blocking=True) for x in batch]

# ----------------------------------------------------------------------------------------------------------------------
# ranks and checkpoints

def everyone(value):
    """`value` of every rank, in a list."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

@contextlib.contextmanager
def all_or_none():
    """Where the block exits on some ranks, all exit: rank 0 prints the first one's sentence, the others are silent."""
    code = None
    try:
        yield
    except SystemExit as error:
        code = error.code
    for code in everyone(code):
        if code is not None:
            sys.exit(1 if isinstance(code, str) and dist.is_initialized() and dist.get_rank() else code)

def all_reduce_gradients(model):
    """
    The sum over the ranks of every gradient, in one piece once a step, where a link is at its best. In DDP's buckets,
    overlapped with the backward pass, the 1.4 GB of 340M parameters took 12 ms of two H200s' 305 (dev/log.md).
    """
    params = sorted(model.parameters(), key=lambda p: -p.numel()) # odd sizes last: those before lie at 16 bytes
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    for p, grad in zip(params, flat.split([p.numel() for p in params])):
        p.grad = grad.view_as(p)

def step_of(path):
    return int(re.fullmatch(r"ckpt_(\d+)\.pt", os.path.basename(path))[1])

def checkpoints(out_dir):
    """Paths of out_dir's checkpoints, newest first."""
    paths = glob.glob(os.path.join(glob.escape(out_dir), "ckpt_*.pt"))
    return sorted((p for p in paths if re.fullmatch(r"ckpt_\d+\.pt", os.path.basename(p))), key=step_of, reverse=True)

def load_checkpoint(out_dir, say=print):
    """The newest checkpoint that verifies, on the CPU, and its path; (None, None) where there is none."""
    for path in checkpoints(out_dir):
        try:
            with zipfile.ZipFile(path) as z: # torch.load alone does not look at the CRCs
                damaged = z.testzip()
            if damaged is None:
                return torch.load(path, map_location="cpu", weights_only=True), path
        except Exception as error: # whatever damaged bytes lead zipfile and pickle into
            damaged = f"{type(error).__name__}: {error}"
        say(f"{path} is damaged ({damaged}), trying the one before")
    if checkpoints(out_dir):
        sys.exit(f"every checkpoint in {out_dir} is damaged: move them away to start again")
    return None, None

def save_checkpoint(out_dir, keep, checkpoint):
    """Writes ckpt_<step>.pt whole or not at all, then removes all but the newest `keep`."""
    path = os.path.join(out_dir, f"ckpt_{checkpoint['step']}.pt")
    try:
        os.makedirs(out_dir, exist_ok=True) # someone may have moved it away
        with open(path + ".tmp", "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
        folder = os.open(out_dir, os.O_RDONLY) # the new name itself must reach the disk
        os.fsync(folder)
        os.close(folder)
    except (OSError, RuntimeError) as error: # RuntimeError: torch's word for a failed write
        free = 0
        with contextlib.suppress(OSError):
            free = os.statvfs(out_dir).f_bavail * os.statvfs(out_dir).f_frsize
            os.remove(path + ".tmp")
        sys.exit(f"cannot write {path}, {free / 1e9:.2f} GB are free on its disk ({brief(error)}): make room and "
                 "continue with --resume=True")
    if keep:
        for old in checkpoints(out_dir)[keep:]:
            os.remove(old)

def open_log(out_dir, header, step):
    """log.jsonl with a new first line and the records up to `step`, open for more; and the last of a step, or {}."""
    path, records = os.path.join(out_dir, "log.jsonl"), []
    if step and os.path.exists(path):
        with open(path, "rb") as f:
            for line in f:
                with contextlib.suppress(ValueError, TypeError, KeyError): # no record: the header, a torn last line
                    if (record := json.loads(line))["step"] <= step:
                        records.append(record)
    with open(path + ".tmp", "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in [header, *records])
    os.replace(path + ".tmp", path)
    return open(path, "a"), next((r for r in reversed(records) if "skipped" in r), {}) # not one of eval_only

def finite(x):
    """x with null for NaN and infinity, which JSON cannot say."""
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, list):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x

def check_resume(cfg, meta, checkpoint, path):
    """
    Exits where the checkpoint's model is not the config's, its tokenizer is not the data's or its steps are of another
    size; returns the other settings that changed, in words.
    """
    saved = checkpoint["config"]
    pairs = {f.name: (saved.get(f.name, f.default), getattr(cfg, f.name)) for f in fields(cfg)}
    changed = {key: (old, new) for key, (old, new) in pairs.items() if old != new}
    for f in fields(ModelConfig):
        if f.name in changed and f.name != "expect_params":
            sys.exit(f"{path} has {f.name}={changed[f.name][0]}, the config {f.name}={changed[f.name][1]}: "
                     "use its value or another out_dir")
    if checkpoint["tokenizer"] != meta["tokenizer"]:
        sys.exit(f"{path} was trained on {checkpoint['tokenizer']} tokens, {cfg.data_dir} holds {meta['tokenizer']} "
                 "tokens: set another data_dir or out_dir")
    if not cfg.eval_only and "batch_tokens" in changed: # step and data order, and so the schedule, count in them
        sys.exit(f"{path} counts steps of batch_tokens={changed['batch_tokens'][0]}, not {cfg.batch_tokens}: use its "
                 "value or another out_dir")
    if not cfg.eval_only and (cfg.muon_lr == 0) != (saved.get("muon_lr", 0.0) == 0): # other moments
        sys.exit(f"{path} has muon_lr={saved.get('muon_lr', 0.0)}, the config {cfg.muon_lr}, and one of them is 0: use "
                 "its value or another out_dir")
    return ", ".join(f"{k} {old} -> {new}" for k, (old, new) in changed.items() if k not in ("resume", "eval_only"))

def explain(cfg, rank, error):
    """A sentence for what only shows while it runs: no memory, disk, compiler or login; None for any other error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
        lower = ("lower batch_size, accumulation keeps the result the same" if cfg.batch_size > 1 else
                 "lower seq_len" if cfg.checkpoint_blocks else "set checkpoint_blocks=True, or lower seq_len")
        return f"rank {rank} is out of memory at batch_size={cfg.batch_size} and seq_len={cfg.seq_len}: {lower}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return (f"cannot use {error.filename or cfg.out_dir} ({error.strerror}): make room there or set another "
                "folder, and continue with --resume=True")
    if type(error).__module__.startswith("wandb"):
        return f"wandb: {brief(error)}; run `wandb login`, set WANDB_MODE=offline or wandb=False"
    if "C++ compiler" in str(error):
        return "compile=True needs a C++ compiler on a CPU: install g++ or set compile=False"

def autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

@torch.no_grad()
def evaluate(cfg, model, split, rank, world, device):
    """Mean loss, nats a token, over eval_tokens of the validation set: always the same rows, the ranks share them."""
    n = split.first[-1]
    count = min(n, max(1, cfg.eval_tokens // cfg.seq_len))
    rows = [i * n // count for i in range(count)]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i in range(rank * cfg.batch_size, count, world * cfg.batch_size):
        mine = rows[i:i + cfg.batch_size]
        filled = mine + mine[:1] * (cfg.batch_size - len(mine)) # one shape, one compiled graph
        idx, targets, ids = to_device(get_batch(cfg, split, filled, cfg.seq_len), device)
        targets[len(mine):] = -100 # what cross_entropy leaves out of its mean
        with autocast(device):
            loss = model(idx, targets, ids)[1]
        total += loss.double() * len(mine)
    if world > 1:
        dist.all_reduce(total)
    return total.item() / count

POSITIONS = [128 << i for i in range(8)] # ends of the buckets, up to 16,384

@torch.no_grad()
def loss_by_position(cfg, model, meta, rank, world, device):
    """
    [end, mean loss, tokens] of each bucket of positions that eval_tokens of the validation set reach, in rows of up to
    16,384 tokens whatever the training length. With reset_at_eot the position counts from the document's start, which
    must lie in the row, and only documents longer than the bucket enter it, so that a bucket's mean is over whole
    documents; else it counts from the row's start.
    """
    lengths = [n for n in POSITIONS if open_split(replace(cfg, seq_len=n), meta, "val").first[-1]]
    if not lengths:
        return []
    cfg = replace(cfg, seq_len=lengths[-1])
    T, split = cfg.seq_len, open_split(cfg, meta, "val")
    n = split.first[-1]
    count = min(n, max(1, cfg.eval_tokens // T))
    ends, place = torch.tensor(lengths, device=device), torch.arange(T, device=device)
    sums = torch.zeros(len(lengths), 2, dtype=torch.float64, device=device) # loss, tokens
    for i in range(rank, count, world):
        idx, targets, ids = to_device(get_batch(cfg, split, [i * n // count], T), device)
        with autocast(device):
            x = model.hidden(idx, ids)[0]
            loss = torch.cat([F.cross_entropy(F.linear(part, model.embed.weight).float(), target, reduction="none")
                              for part, target in zip(x.split(1024), targets[0].split(1024))])
        position, length = place, T # of each token, and of what it counts from
        if ids is not None:
            position = place - torch.where(idx[0] == split.eot, place, 0).cummax(0)[0]
            length = torch.where(ids[0] > 0, ids[0].bincount()[ids[0]], 0) # 0: its document began before the row
        bucket = torch.bucketize(position, ends, right=True)
        counts = (bucket == torch.arange(len(ends), device=device)[:, None]) & (length >= ends[bucket])
        sums += counts.double() @ torch.stack([loss, torch.ones_like(loss)], 1).double()
    if world > 1:
        dist.all_reduce(sums)
    return [[end, loss / tokens, int(tokens)] for end, (loss, tokens) in zip(lengths, sums.tolist()) if tokens]

if __name__ == "__main__":
    # ------------------------------------------------------------------------------------------------------------------
    # ranks

    started = time.time()
    sys.stdout and sys.stdout.reconfigure(errors="replace") # for a terminal that lacks a character of a path
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0)) # set by torchrun
    world, local_world = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"nproc_per_node must be at most {torch.cuda.device_count()}, the number of this machine's GPUs")
        torch.cuda.set_device(device)
        if torch.cuda.get_device_capability() < (8, 0):
            sys.exit(f"{torch.cuda.get_device_name()} has no bf16: a GPU from A100 on is needed")
    if "RANK" in os.environ:
        # torchrun's restarts share one store: without a prefix of its own a restart would meet the dead ranks' keys
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), next(rendezvous("env://"))[0])
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world,
                                timeout=timedelta(minutes=30), device_id=device if device.type == "cuda" else None)

    def say(*words):
        if rank == 0:
            try:
                print(*words, flush=True)
            except BrokenPipeError: # of `| tee`, which the Ctrl-C that this run saves after has ended already
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    # ------------------------------------------------------------------------------------------------------------------
    # settings, data, model: everything a user can get wrong is said before step 0

    with all_or_none():
        cfg = config.load(TrainConfig)
        check(cfg, world)
        if cfg.wandb and not importlib.util.find_spec("wandb"):
            sys.exit("wandb=True needs a package that is not installed: pip install wandb")
        meta, splits = open_data(cfg)
        mine = sorted(meta["shards"].items())[local_rank::local_world] # each node hashes its own copy of the shards
        verify_shards(cfg.data_dir, mine, max(1, os.cpu_count() // local_world))

    asked_to_stop = False

    def say_or_trace(kind, error, trace):
        sentence = explain(cfg, rank, error)
        if asked_to_stop and not sentence: # a terminal's Ctrl-C goes to the compilers that this process runs as well
            sentence = (f"asked to stop, and the step could not be finished ({kind.__name__}): continue with "
                        "--resume=True")
        print(sentence, file=sys.stderr) if sentence else sys.__excepthook__(kind, error, trace)

    sys.excepthook = say_or_trace

    # a fixed order for the embedding's gradient, which is atomics otherwise; nothing reads uninitialised memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    with all_or_none():
        torch.manual_seed(cfg.seed)
        try:
            model = LM(cfg)
        except AssertionError as error:
            sys.exit(str(error))
        for block in model.blocks if cfg.zero_out else ():
            torch.nn.init.zeros_(block.mixer.out_proj.weight)
            torch.nn.init.zeros_(block.mlp.out_proj.weight)
        model.checkpoint_blocks = cfg.checkpoint_blocks
        model.to(device)
        groups = model.optim_groups(cfg.weight_decay, cfg.muon_lr / cfg.learning_rate)
        optimizer = Muon(groups, betas=(cfg.beta1, cfg.beta2), fused=True)
        if not (cfg.resume or cfg.eval_only) and checkpoints(cfg.out_dir):
            sys.exit(f"{cfg.out_dir} holds checkpoints: continue them with --resume=True, or set another out_dir")
        checkpoint, path = load_checkpoint(cfg.out_dir, say) if cfg.resume or cfg.eval_only else (None, None)
        if cfg.eval_only and checkpoint is None:
            sys.exit(f"{cfg.out_dir} holds no checkpoint to evaluate: train one first, or set out_dir")
        start, run_id = 0, uuid.uuid4().hex[:8]
        if checkpoint is not None:
            try:
                changed = check_resume(cfg, meta, checkpoint, path)
                start, seen, run_id = checkpoint["step"], checkpoint["tokens"], checkpoint["run_id"]
                say(f"{'evaluating' if cfg.eval_only else 'continuing from'} {path}"
                    + (f", changed settings: {changed}" if changed else ""))
                model.load_state_dict(checkpoint["model"])
                moments = checkpoint["optimizer"]["state"]
            except (KeyError, RuntimeError) as error:
                sys.exit(f"{path} does not fit this train.py and model.py ({brief(error)}): set another "
                         "out_dir")
            # the moments alone: learning rate, betas and decay are the config's
            optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        elif cfg.resume:
            say(f"{cfg.out_dir} holds no checkpoint, starting at step 0")
        checkpoint = moments = None # frees their memory
    with all_or_none():
        if len(set(everyone(start))) > 1:
            sys.exit(f"the ranks see different checkpoints in {cfg.out_dir}: put it on a disk that all nodes share")
        if rank == 0 and not cfg.eval_only:
            try:
                os.makedirs(cfg.out_dir, exist_ok=True)
                folder = os.open(cfg.out_dir, os.O_RDONLY)
            except OSError as error:
                sys.exit(f"cannot make {cfg.out_dir} ({error.strerror}): set another out_dir")
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) # until this process ends, however it does
            except BlockingIOError:
                sys.exit(f"another run is training in {cfg.out_dir}: wait for its end, or set another out_dir")
            except OSError:
                pass # a disk without locks
            for leftover in glob.glob(os.path.join(glob.escape(cfg.out_dir), "ckpt_*.pt.tmp")):
                os.remove(leftover)
            for damaged in (p for p in checkpoints(cfg.out_dir) if step_of(p) > start): # else `keep` would count it
                os.replace(damaged, damaged + ".damaged")
                say(f"{damaged} is {os.path.basename(damaged)}.damaged now: delete it once it is of no use")

    if cfg.compile:
        # a graph for each length of the curriculum, with and without gradient
        torch._dynamo.config.recompile_limit = 64
        model.compile(fullgraph=True, dynamic=False)
    if world > 1: # the ranks' processors may have drawn other first values
        for p in model.parameters():
            dist.broadcast(p.data, 0)

    n_rows, rows = splits["train"].first[-1], cfg.batch_tokens // cfg.seq_len # of the data, of a step
    accumulation = rows // (cfg.batch_size * world)
    steps = cfg.steps
    end = min(steps, cfg.max_steps or steps)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    peak = peak_flops(name)
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": str(np.__version__)}
    if importlib.util.find_spec("triton"):
        versions["triton"] = importlib.metadata.version("triton")
    flops = model.flops_per_token(cfg.seq_len)
    say(f"model: {cfg.mixer}, {model.num_params():,} parameters, {flops / 1e9:.3f} GFLOP a token")
    say(f"data: {cfg.data_dir} ({meta['tokenizer']}), {n_rows:,} rows of {cfg.seq_len} tokens; "
        f"{steps * rows / n_rows:.2f} epochs in {steps:,} steps")
    if not cfg.eval_only:
        say(f"batch: {cfg.batch_size} rows * {cfg.seq_len} tokens * {world} ranks * {accumulation} micro-steps = "
            f"{cfg.batch_tokens:,} tokens; {steps:,} steps = {steps * cfg.batch_tokens:,} tokens, now {start:,} to "
            f"{end:,}")
        if start >= end:
            say(f"nothing is left to train: step {start:,} is done; for more raise total_tokens or max_steps")
    say(f"device: {world} x {name}" + ("" if peak or device.type == "cpu" else ", not in PEAK_FLOPS: no MFU"))

    def validation():
        """val_loss and val_ppl a token, val_bpb: bits per byte of the validation text, at its mean bytes per token."""
        loss = evaluate(cfg, model, splits["val"], rank, world, device)
        bpb = loss / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
        return {"val_loss": loss, "val_ppl": float(np.exp(loss)), "val_bpb": bpb}

    if cfg.eval_only:
        record = {"step": start, "tokens": seen, **validation()}
        say(", ".join(f"{k} {v:.4f}" for k, v in record.items() if k.startswith("val_")))
        record["val_loss_by_position"] = by_position = loss_by_position(cfg, model, meta, rank, world, device)
        for first, (last, loss, tokens) in zip([0, *(last for last, *_ in by_position)], by_position):
            say(f"position {first:,} to {last:,} in the {'document' if cfg.reset_at_eot else 'row'}: loss {loss:.4f}, "
                f"of {tokens:,} tokens")
        if rank == 0:
            with open(os.path.join(cfg.out_dir, "log.jsonl"), "a") as log:
                print(json.dumps(finite(record)), file=log)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(0)

    # ------------------------------------------------------------------------------------------------------------------
    # logs

    if rank == 0:
        commit = ""
        with contextlib.suppress(FileNotFoundError): # no git on this machine
            commit = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], text=True,
                                    cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True).stdout.strip()
        log, last = open_log(cfg.out_dir, {"config": asdict(cfg), "commit": commit, "versions": versions}, start)
    if rank == 0 and cfg.wandb:
        import wandb
        wandb.init(project=cfg.wandb_project, id=run_id, resume="allow", dir=cfg.out_dir,
                   config={**asdict(cfg), "commit": commit, "versions": versions})
        wandb.define_metric("*", step_metric="step") # its own counter would drop the steps that a restart repeats

    # ------------------------------------------------------------------------------------------------------------------
    # training

    def ask_to_stop(signum, frame):
        global asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    everyone(None) # no rank starts before all have come here, where a signal is a request

    def load(step, micro_step):
        mine = train_rows(cfg, n_rows, step, micro_step, rank, world)
        return get_batch(cfg, splits["train"], mine, get_seq_len(cfg, step), pin=device.type == "cuda")

    pool = ThreadPoolExecutor(1) # reads the next batch while this one computes
    pending = pool.submit(load, start, 0)
    in_a_row, skipped = torch.zeros(2, device=device) # steps dropped just now, and in all
    if rank == 0:
        skipped = skipped + last.get("skipped", 0)
    if device.type == "cuda":
        late, arrived = torch.zeros(5, pin_memory=True), torch.cuda.Event()
    since, logged = time.time(), start

    for step in range(start, end):
        lr, T = get_lr(cfg, step), get_seq_len(cfg, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros(2, device=device) # loss, number of ranks asked to stop
        for micro_step in range(accumulation):
            idx, targets, ids = to_device(pending.result(), device)
            pending = pool.submit(load, *divmod(step * accumulation + micro_step + 1, accumulation))
            with autocast(device):
                loss = model(idx, targets, ids)[1] / (accumulation * world) # the step's is the sum, its gradient too
            loss.backward()
            total[0] += loss.detach()
        total[1] = asked_to_stop
        if world > 1:
            dist.all_reduce(total)
            all_reduce_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
        # loss and norm are the same on every rank: where they are not finite all drop the step, moments untouched
        optimizer.found_inf = dropped = (~torch.isfinite(total[0] + norm)).float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        in_a_row, skipped = (in_a_row + 1) * dropped, skipped + dropped
        numbers = torch.stack([total[0], norm, skipped, in_a_row, total[1]])
        if device.type == "cuda": # those of the step before, so that the GPU is never waited for
            arrived.synchronize()
            *_, row_of_drops, stop = late.tolist()
            late.copy_(numbers, non_blocking=True)
            arrived.record()
        else:
            *_, row_of_drops, stop = numbers.tolist()
        if row_of_drops >= 10:
            sys.exit(f"10 steps in a row by step {step + 1} had a loss or gradient that is not finite: lower "
                     "learning_rate or look at their data, and continue with --resume=True" if rank == 0 else 1)

        done = step + 1
        evaluating = done == end or (cfg.eval_interval and done % cfg.eval_interval == 0)
        saving = done == end or stop or (cfg.save_interval and done % cfg.save_interval == 0)
        if not (done == start + 1 or done % cfg.log_interval == 0 or evaluating or saving):
            continue
        loss, norm, n_skipped, *_ = numbers.tolist()
        seconds = (time.time() - since) / (done - logged) # of a step
        rate = cfg.batch_tokens / seconds
        record = {"step": done, "tokens": done * cfg.batch_tokens, "loss": loss, "lr": lr, "grad_norm": norm,
                  "ms": 1000 * seconds, "tok_s": rate, "mfu": peak and model.flops_per_token(T) * rate / (peak * world),
                  "mem_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
                  "skipped": int(n_skipped), **(validation() if evaluating else {})}
        if done == start + 1:
            say(f"first step {time.time() - started:.1f} s after the start, loading and compiling included")
        say(f"step {done:,}/{end:,} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.3f} | {1000 * seconds:,.0f} ms | "
            f"{rate:,.0f} tok/s" + (f" | mfu {record['mfu']:.1%}" if peak else "") +
            (f" | {n_skipped:.0f} steps dropped" if n_skipped else "") +
            (f" | val loss {record['val_loss']:.4f}, bits a byte {record['val_bpb']:.4f}" if evaluating else "") +
            f" | {timedelta(seconds=int(seconds * (end - done)))} left")
        if rank == 0:
            record = finite(record)
            print(json.dumps(record), file=log, flush=True)
            if cfg.wandb:
                wandb.log(record)
            if saving:
                save_checkpoint(cfg.out_dir, cfg.keep, {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done,
                    "tokens": done * cfg.batch_tokens, "config": asdict(cfg), "tokenizer": meta["tokenizer"],
                    "vocab_size": meta["vocab_size"], "run_id": run_id, "versions": versions})
        if stop:
            say(f"asked to stop: saved step {done:,}, continue with --resume=True")
            break
        since, logged = time.time(), done

    if rank == 0 and cfg.wandb:
        wandb.finish()
    if dist.is_initialized():
        dist.destroy_process_group()
