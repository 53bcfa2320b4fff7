"""
The scripts as their users run them: subprocesses, real files, kills, two ranks on gloo, exit codes and messages.

    pytest test_scripts.py                                      # CPU
    TIKTOKEN_CACHE_DIR=DIR pytest test_scripts.py               # also what needs the GPT-2 vocabulary offline
"""
import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import config
import train

ROOT = os.path.dirname(os.path.abspath(__file__))

def run(*args, cwd=ROOT, env=None, timeout=300):
    """`python ARGS` in its own process; returns the finished process with text stdout and stderr."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env=env, timeout=timeout,
                          capture_output=True, text=True)

def refused(p, *words):
    """A user's mistake: exit status 1, one sentence on stderr that holds every one of `words`, no traceback."""
    assert p.returncode == 1, (p.returncode, p.stdout, p.stderr)
    assert "Traceback" not in p.stderr, p.stderr
    lines = [line for line in p.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, p.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])

# ----------------------------------------------------------------------------------------------------------------------
# config/

@dataclasses.dataclass(frozen=True)
class Settings:
    n_layer: int = 2
    learning_rate: float = 0.1
    out_dir: str = "out"
    compile: bool = True

def test_config_overrides(tmp_path):
    """Left to right: defaults, file, flags; an int may stand for a float; names with _ are the file's own."""
    file = tmp_path / "a.py"
    file.write_text("import math as _math\n_n = 3\nn_layer, learning_rate = _n + 1, 1\n")
    cfg = config.load(Settings, [str(file), "--out_dir=a=b", "--compile=False"])
    assert dataclasses.astuple(cfg) == (4, 1.0, "a=b", False) and type(cfg.learning_rate) is float
    assert config.load(Settings, ["--n_layer=5", str(file)]).n_layer == 4
    assert config.load(Settings, []) == Settings()

@pytest.mark.parametrize("arg, sentence", [
    ("--leraning_rate=1", "--leraning_rate=1: unknown key 'leraning_rate', did you mean 'learning_rate'?"),
    ("--zzz=1", "--zzz=1: unknown key 'zzz'"),
    ("--n_layer=2.5", "--n_layer=2.5: n_layer must be int, got '2.5'"),
    ("--learning_rate=fast", "--learning_rate=fast: learning_rate must be float, got 'fast'"),
    ("--compile=yes", "--compile=yes: compile must be bool, got 'yes'"),
    ("--compile", "--compile: flags are written --key=value"),
    ("none.py", "none.py: not a config file and not a --key=value flag"),
    ("n_layer = '2'", "FILE: n_layer must be int, got '2'"),
    ("n_layer = True", "FILE: n_layer must be int, got True"),
    ("n_layers = 2", "FILE: unknown key 'n_layers', did you mean 'n_layer'?"),
    ("n_layer = 1 / 0", "FILE: ZeroDivisionError: division by zero"),
])
def test_config_refuses(tmp_path, arg, sentence):
    if " = " in arg: # the text of a config file
        file = tmp_path / "bad.py"
        file.write_text(arg + "\n")
        arg, sentence = str(file), sentence.replace("FILE", str(file))
    with pytest.raises(SystemExit) as e:
        config.load(Settings, [arg])
    assert e.value.code == sentence

@pytest.mark.parametrize("name", ["tiny", "gla_340m", "gdn_340m", "transformer_340m"])
def test_config_files(name):
    """Every config loads, passes the checks on its GPUs, and the 340M ones have their parameters."""
    cfg = config.load(train.TrainConfig, [os.path.join(ROOT, "config", name + ".py")])
    train.check(cfg, 8 if "340m" in name else 1)
    if "340m" in name:
        assert (cfg.seq_len, cfg.batch_size, cfg.batch_tokens, cfg.expect_params) == (2048, 32, 524_288, 340_000_000)
        assert (cfg.data_dir, cfg.out_dir) == ("data/slimpajama-gpt2", "out/" + name)
        with torch.device("meta"):
            assert abs(train.LM(cfg).num_params() / 340e6 - 1) < 0.01

# ----------------------------------------------------------------------------------------------------------------------
# prepare.py

# ----------------------------------------------------------------------------------------------------------------------
# train.py

SMALL = """--mixer=gdn --n_layer=1 --n_head=1 --n_embd=32 --d_key=16 --d_value=16 --d_mlp=32 --conv_size=4
    --vocab_size=264
    --seq_len=32 --batch_size=8 --batch_tokens=256 --total_tokens=5120 --warmup_tokens=1024 --learning_rate=0.01
    --compile=False --log_interval=1 --eval_tokens=512 --save_interval=5 --keep=0""".split() # 20 steps of 8 rows

# python faulty.py FAULT RANKS STEP train.py ...: a signal to itself, a NaN loss or no memory on some ranks at a step
FAULTY = """
import os, runpy, signal, sys
import torch, model
fault, ranks, step, sys.argv = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4:]
here = os.environ.get("RANK", "0") in ranks and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
update, forward, done = torch.optim.AdamW.step, model.LM.forward, 0

def faulty_update(self, *args):
    global done
    done += 1
    if here and done == step and fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    return update(self, *args)

def faulty_forward(self, *args):
    logits, loss = forward(self, *args)
    if here and torch.is_grad_enabled() and (done == step - 1 or fault == "nans" and done >= step - 1):
        if fault == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss = loss * float("nan")
    return logits, loss

torch.optim.AdamW.step = faulty_update
if not fault.startswith("SIG"):
    model.LM.forward = faulty_forward
runpy.run_path("train.py", run_name="__main__")
"""

def write_shards(folder, train, val, vocab_size=257):
    """A data folder as prepare.py makes it; train and val are lists of shards, a shard a list of ids."""
    os.makedirs(folder)
    meta = {"tokenizer": "bytes", "vocab_size": vocab_size, "eot": 256, "shards": {}}
    for split, shards in (("train", train), ("val", val)):
        meta[split + "_tokens"] = meta[split + "_bytes"] = sum(map(len, shards))
        for i, ids in enumerate(shards):
            name, data = f"{split}_{i:05d}.bin", np.array(ids, dtype="<u2").tobytes()
            with open(os.path.join(folder, name), "wb") as f:
                f.write(data)
            meta["shards"][name] = {"tokens": len(ids), "sha256": hashlib.sha256(data).hexdigest()}
    with open(os.path.join(folder, "meta.json"), "w") as f:
        json.dump(meta, f)
    return str(folder)

def documents(seed, tokens):
    """Documents of 4 to 59 letters, each a neighbour of the last in the alphabet: there is something to learn."""
    rng, ids = np.random.default_rng(seed), []
    while len(ids) < tokens:
        ids += [256, *(97 + rng.choice([-1, 1], rng.integers(4, 60)).cumsum() % 26)]
    return [int(i) for i in ids[:tokens]]

@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two training shards of 93 and 62 rows of 32 tokens, a validation shard of 31."""
    return write_shards(tmp_path_factory.mktemp("data") / "letters", [documents(0, 3000), documents(1, 2000)],
                        [documents(2, 1000)])

@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    path = tmp_path_factory.mktemp("faulty") / "faulty.py"
    path.write_text(FAULTY)
    return str(path)

@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """out_dir of the run that the others are compared with: one rank, never stopped, evaluated every 5 steps."""
    out = tmp_path_factory.mktemp("whole") / "out"
    p = run("train.py", *SMALL, f"--data_dir={shards}", f"--out_dir={out}", "--eval_interval=5", "--save_interval=1")
    assert p.returncode == 0, p.stderr
    assert "asked to stop" not in p.stdout and "first step" in p.stdout
    return out

def start(shards, out, *flags, prefix=(), env=None, timeout=300):
    """train.py with SMALL's settings, `prefix` before it (torchrun, faulty.py); its log afterwards is log_of(out)."""
    return run(*prefix, "train.py", *SMALL, f"--data_dir={shards}", f"--out_dir={out}", *flags,
               env={"PYTHONPATH": ROOT, **(env or {})}, timeout=timeout)

def log_of(out):
    """{step: record} of log.jsonl, whose first line is the header."""
    with open(os.path.join(out, "log.jsonl")) as f:
        header, *records = map(json.loads, f)
    assert set(header) == {"config", "commit", "versions"}
    assert [r["step"] for r in records] == sorted({r["step"] for r in records})
    return {r["step"]: r for r in records}

def ranks(n):
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}")

def same_curve(a, b, tolerance=0.0):
    """Losses and gradient norms of every step that either log has; not a single one may be missing."""
    assert list(a) == list(b)
    for step in a:
        for key in ("loss", "grad_norm"):
            x, y = a[step][key], b[step][key]
            assert abs(x - y) <= tolerance * abs(y), (step, key, x, y)

def test_train_logs_and_checkpoints(whole):
    log, saved = log_of(whole), train.load_checkpoint(str(whole))[0]
    assert list(log) == list(range(1, 21))
    assert set(log[1]) == {"step", "tokens", "loss", "lr", "grad_norm", "ms", "tok_s", "mfu", "mem_gb", "skipped"}
    assert set(log[5]) - set(log[1]) == {"val_loss", "val_ppl", "val_bpb"}
    assert log[20]["tokens"] == 5120 and log[20]["val_loss"] < log[5]["val_loss"] < math.log(264)
    assert abs(log[20]["val_ppl"] / math.exp(log[20]["val_loss"]) - 1) < 1e-9
    assert abs(log[20]["val_bpb"] * math.log(2) / log[20]["val_loss"] - 1) < 1e-9 # a byte is a token here
    assert set(saved) == {"model", "optimizer", "step", "tokens", "config", "tokenizer", "vocab_size", "run_id",
                          "versions"}
    assert (saved["step"], saved["tokens"], saved["tokenizer"], saved["vocab_size"]) == (20, 5120, "bytes", 257)
    assert set(saved["model"]) == set(train.LM(train.TrainConfig(**saved["config"])).state_dict())
    assert saved["config"] == json.loads(open(whole / "log.jsonl").readline())["config"]
    assert not list(whole.glob("*.tmp"))

def test_evaluation_does_not_change_training(shards, whole, tmp_path):
    """And keep=2 keeps two; one evaluation a run, at its end, is the one of the run with four."""
    p = start(shards, tmp_path / "out", "--eval_interval=0", "--keep=2")
    assert p.returncode == 0, p.stderr
    same_curve(log_of(tmp_path / "out"), log_of(whole))
    assert log_of(tmp_path / "out")[20]["val_loss"] == log_of(whole)[20]["val_loss"]
    assert sorted(f.name for f in (tmp_path / "out").glob("ckpt*")) == ["ckpt_15.pt", "ckpt_20.pt"]
    p = start(shards, tmp_path / "out", "--eval_only=True")
    assert p.returncode == 0 and f"val_loss {log_of(whole)[20]['val_loss']:.4f}" in p.stdout
    p = start(shards, tmp_path / "out", "--resume=True", "--n_embd=64")
    refused(p, "n_embd=32", "n_embd=64")
    refused(start(shards, tmp_path / "out"), "holds checkpoints", "--resume=True")

def killed_twice(shards, out, faulty, *flags, prefix=(), **how):
    """A run killed with SIGKILL in its 8th step, again in the 5th of its second life, that then goes on to its end."""
    for step in (8, 5):
        p = start(shards, out, "--resume=True", *flags, prefix=(faulty, "SIGKILL", 0, step), **how)
        assert p.returncode == -signal.SIGKILL, (p.returncode, p.stderr)
    with open(out / "log.jsonl", "a") as f:
        f.write('{"step": 10, "lo') # what a kill in the middle of a line leaves
    (out / "ckpt_99.pt.tmp").write_bytes(b"torn")
    p = start(shards, out, "--resume=True", *flags, prefix=prefix, **how)
    assert p.returncode == 0 and f"continuing from {out}/ckpt_5.pt" in p.stdout, p.stderr
    assert not list(out.glob("*.tmp"))

def test_resume_is_bitwise(shards, whole, faulty, tmp_path):
    killed_twice(shards, tmp_path / "out", faulty, "--eval_interval=5")
    same_curve(log_of(tmp_path / "out"), log_of(whole))
    a, b = (train.load_checkpoint(str(out))[0] for out in (tmp_path / "out", whole))
    for name in b["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    for i, state in b["optimizer"]["state"].items():
        assert all(torch.equal(a["optimizer"]["state"][i][key], x) for key, x in state.items()), i

@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for a CPU takes a C++ compiler")
def test_resume_is_bitwise_compiled(shards, faulty, tmp_path):
    """One cache for all: what is compared is the arithmetic, the embedding's gradient above all, not the compiler."""
    how = {"env": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}, "timeout": 900}
    flags = ("--compile=True", "--n_layer=2", "--conv_size=0", "--total_tokens=10240")
    # a SIGTERM at the end of step 20 of 40 spares the evaluation, whose graph would have to be compiled too
    p = start(shards, tmp_path / "whole", *flags, prefix=(faulty, "SIGTERM", 0, 20), **how)
    assert p.returncode == 0, p.stderr
    killed_twice(shards, tmp_path / "out", faulty, *flags, prefix=(faulty, "SIGTERM", 0, 15), **how)
    assert list(log_of(tmp_path / "out")) == list(range(1, 22))
    same_curve(log_of(tmp_path / "out"), log_of(tmp_path / "whole"))

def gradient(out):
    """Of the first step, from Adam's first moment, (1 - beta1) times it where nothing is clipped."""
    state = torch.load(os.path.join(out, "ckpt_1.pt"), weights_only=True)["optimizer"]["state"]
    return torch.cat([state[i]["exp_avg"].double().flatten() for i in sorted(state)])

def test_ranks_and_accumulation_change_nothing(shards, tmp_path):
    """A batch of 16 rows as 16, as 4 micro-steps of 4, and as 4 of 2 on each of 2 ranks, over 10 steps."""
    ways = {"one": (16, ()), "accumulated": (4, ()), "ranks": (2, ranks(2))}
    for name, (batch_size, prefix) in ways.items():
        p = start(shards, tmp_path / name, f"--batch_size={batch_size}", "--batch_tokens=512", "--max_steps=10",
                  "--grad_clip=0", "--save_interval=1", "--warmup_tokens=512", "--learning_rate=1e-3", "--mixer=gla",
                  prefix=prefix)
        assert p.returncode == 0, p.stderr
    for name in ("accumulated", "ranks"):
        same_curve(log_of(tmp_path / name), log_of(tmp_path / "one"), 1e-5)
        a, b = gradient(tmp_path / name), gradient(tmp_path / "one")
        assert (a - b).norm() <= 1e-6 * b.norm(), (name, ((a - b).norm() / b.norm()).item())
        assert abs(log_of(tmp_path / name)[10]["val_loss"] / log_of(tmp_path / "one")[10]["val_loss"] - 1) < 1e-5

def test_two_nodes(shards, whole, tmp_path):
    """Two torchrun agents on this machine, one rank each, as two nodes would."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    agent = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
             f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=1")
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(start, shards, tmp_path / "out", "--batch_size=4", "--eval_interval=5", prefix=agent)
                for _ in range(2)]
    for p in both:
        assert p.result().returncode == 0, p.result().stderr
    same_curve(log_of(tmp_path / "out"), log_of(whole), 1e-3)

def test_restart_after_a_killed_rank(shards, whole, faulty, tmp_path):
    p = start(shards, tmp_path / "out", "--batch_size=4", "--resume=True", "--eval_interval=5",
              prefix=(*ranks(2), "--max-restarts=3", faulty, "SIGKILL", 1, 8))
    assert p.returncode == 0, p.stderr
    assert "starting at step 0" in p.stdout and "continuing from" in p.stdout
    same_curve(log_of(tmp_path / "out"), log_of(whole), 1e-3)

@pytest.mark.parametrize("who", ["1", "0,1"])
def test_sigterm_saves_and_exits_0(shards, faulty, tmp_path, who):
    """To one rank or to all; the step in which it comes is finished."""
    p = start(shards, tmp_path / "out", "--batch_size=4", prefix=(*ranks(2), faulty, "SIGTERM", who, 7))
    assert p.returncode == 0, p.stderr
    assert "asked to stop: saved step" in p.stdout
    assert list(log_of(tmp_path / "out"))[-1] == train.load_checkpoint(str(tmp_path / "out"))[0]["step"] == 8

def test_sigint_from_outside(shards, tmp_path):
    """A Ctrl-C, and more of them while it saves."""
    p = subprocess.Popen([sys.executable, "train.py", *SMALL, "--total_tokens=1_000_000_000", f"--data_dir={shards}",
                          f"--out_dir={tmp_path / 'out'}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in p.stdout:
        if line.startswith("step 3/"):
            break
    while p.poll() is None:
        p.send_signal(signal.SIGINT)
        time.sleep(0.01)
    # -SIGINT: one came after Python had taken its handlers down
    assert p.returncode in (0, -signal.SIGINT), p.returncode
    assert "asked to stop: saved step" in p.stdout.read()
    assert train.load_checkpoint(str(tmp_path / "out"))[0] is not None

def test_nan_on_one_rank_drops_the_step(shards, whole, faulty, tmp_path):
    """On both ranks, without a trace in the moments; and the curve goes on."""
    p = start(shards, tmp_path / "out", "--batch_size=4", "--save_interval=1", prefix=(*ranks(2), faulty, "nan", 1, 7))
    assert p.returncode == 0 and "1 steps dropped" in p.stdout, p.stderr
    log = log_of(tmp_path / "out")
    assert log[7]["loss"] is None and log[7]["grad_norm"] is None
    assert all(math.isfinite(log[s]["loss"]) for s in log if s != 7) and log[20]["loss"] < log[1]["loss"]
    assert [log[s]["skipped"] for s in (6, 7, 20)] == [0, 1, 1]
    same_curve({s: log[s] for s in range(1, 7)}, {s: log_of(whole)[s] for s in range(1, 7)}, 1e-3)
    before, after, end = (torch.load(tmp_path / "out" / f"ckpt_{s}.pt", weights_only=True) for s in (6, 7, 20))
    assert all(torch.equal(before["model"][k], after["model"][k]) for k in before["model"])
    for i, state in before["optimizer"]["state"].items():
        assert all(torch.equal(x, after["optimizer"]["state"][i][key]) for key, x in state.items()), i
    assert all(state["step"] == 19 for state in end["optimizer"]["state"].values())

def test_ten_dropped_steps_stop_the_run(shards, faulty, tmp_path):
    p = start(shards, tmp_path / "out", prefix=(faulty, "nans", 0, 3))
    refused(p, "10 steps in a row by step 12", "learning_rate")
    assert list(log_of(tmp_path / "out"))[-1] == 11

@pytest.mark.parametrize("flags, word", [((), "lower batch_size"), (("--batch_size=1",), "checkpoint_blocks=True"),
                                         (("--batch_size=1", "--checkpoint_blocks=True"), "lower seq_len")])
def test_out_of_memory_says_what_to_lower(shards, faulty, tmp_path, flags, word):
    refused(start(shards, tmp_path / "out", *flags, prefix=(faulty, "oom", 0, 2)), "out of memory", word)

def test_damaged_checkpoint_falls_back(whole, tmp_path):
    """Torn at any length, altered in any bit: what loads is the newest file's values or the one before, no others."""
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(whole / "ckpt_10.pt", out)
    good = (whole / "ckpt_11.pt").read_bytes()
    newest = torch.load(whole / "ckpt_11.pt", weights_only=True)
    rng = np.random.default_rng(0)
    fell_back = 0
    for trial in range(60):
        bad = bytearray(good)
        if trial < 15:
            del bad[int(rng.integers(len(bad))):]
        else:
            bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
        (out / "ckpt_11.pt").write_bytes(bad)
        loaded, path = train.load_checkpoint(str(out), lambda *words: None)
        if loaded["step"] == 10:
            fell_back += 1
        else: # a byte that nothing reads
            assert trial >= 15 and all(torch.equal(loaded["model"][k], x) for k, x in newest["model"].items())
    assert fell_back >= 40, fell_back
    os.remove(out / "ckpt_11.pt")
    assert train.load_checkpoint(str(out))[0]["step"] == 10
    (out / "ckpt_10.pt").write_bytes(good[:1000])
    with pytest.raises(SystemExit, match="every checkpoint in"):
        train.load_checkpoint(str(out))

def test_resume_falls_back_and_repeats_the_curve(shards, whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for step in range(11, 21):
        (out / f"ckpt_{step}.pt").write_bytes((out / f"ckpt_{step}.pt").read_bytes()[:-3000])
    p = start(shards, out, "--resume=True", "--eval_interval=5")
    assert p.returncode == 0 and "ckpt_20.pt is damaged" in p.stdout and f"continuing from {out}/ckpt_10.pt" in p.stdout
    same_curve(log_of(out), log_of(whole))

def test_full_disk_keeps_the_last_checkpoint(shards, tmp_path):
    """The limit on a file's size stands for the full disk: the write fails half-way, as torch sees it too."""
    out = tmp_path / "out"
    p = start(shards, out, "--max_steps=5")
    assert p.returncode == 0, p.stderr
    size = (out / "ckpt_5.pt").stat().st_size
    limited = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2},) * 2); " \
              "import sys; sys.argv = sys.argv[1:]; runpy.run_path('train.py', run_name='__main__')"
    p = start(shards, out, "--resume=True", prefix=("-c", limited))
    refused(p, "cannot write", "ckpt_10.pt", "GB are free")
    assert [f.name for f in out.glob("ckpt*")] == ["ckpt_5.pt"] and train.load_checkpoint(str(out))[0]["step"] == 5

def altered(shards, folder, change):
    shutil.copytree(shards, folder)
    change(folder / "train_00001.bin")
    return folder

@pytest.mark.parametrize("change, word", [
    (os.remove, "cannot be read"),
    (lambda path: os.truncate(path, 3998), "3998 bytes long, not 4000"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"), "altered"),
])
def test_damaged_shard_is_named(shards, tmp_path, change, word):
    """On whichever rank it is hashed; only rank 0 speaks."""
    data = altered(shards, tmp_path / "data", change)
    if change is os.remove:
        p = start(data, tmp_path / "out", "--batch_size=4", prefix=ranks(2))
        assert p.returncode == 1 and p.stderr.count("train_00001.bin cannot be read") == 1, p.stderr
        assert p.stderr.count("Traceback") == 1, p.stderr # torchrun's own
    else:
        refused(start(data, tmp_path / "out"), "train_00001.bin", word, "prepare.py")
    assert not (tmp_path / "out").exists()

@pytest.mark.parametrize("flags, words", [
    (["--data_dir=none"], ["none/meta.json is missing", "prepare.py"]),
    (["--vocab_size=200"], ["ids up to 256", "vocab_size=200", "384"]),
    (["--batch_size=3"], ["batch_tokens=256", "3 * 32 * 1 = 96"]),
    (["--seq_len=1024", "--batch_size=1", "--batch_tokens=1024", "--total_tokens=10240"], ["val row", "lower seq_len"]),
    (["--mixer=attention"], ["reset_at_eot=False"]),
    (["--mixer=mamba"], ["gla, gdn, attention", "'mamba'"]),
    (["--expect_params=20_000"], ["expect_params=20,000"]),
    (["--eval_only=True"], ["no checkpoint to evaluate"]),
    (["--out_dir=train.py/out"], ["train.py/out"]),
])
def test_train_refuses(shards, tmp_path, flags, words):
    refused(start(shards, tmp_path / "out", *flags), *words)

@pytest.mark.parametrize("flag, words", [
    ("--schedule=linear", ["cosine or wsd"]), ("--decay_frac=1.5", ["decay_frac"]), ("--beta2=1.0", ["beta2"]),
    ("--seq_len=0", ["seq_len must be above 0"]), ("--learning_rate=-1.0", ["learning_rate"]), ("--seed=-1", ["seed"]),
    ("--learning_rate=nan", ["learning_rate"]), ("--total_tokens=100", ["total_tokens=100"]), ("--keep=-1", ["keep"]),
    ("--warmup_tokens=5120", ["warmup_tokens=5120"]), ("--seq_len_start=24", ["seq_len_start=24"]),
    ("--seq_len_start=64", ["seq_len_start=64"]), ("--log_interval=0", ["log_interval"]),
])
def test_settings_are_checked(flag, words):
    with pytest.raises(SystemExit) as e:
        train.check(config.load(train.TrainConfig, [*SMALL, flag]), 1)
    assert all(word in e.value.code for word in words), e.value.code
    train.check(config.load(train.TrainConfig, SMALL), 1)

def test_get_lr_at_its_ends():
    """Exact values: above 0 at first, the maximum at the end of warm-up, the minimum at the last step."""
    cfg = train.TrainConfig(batch_tokens=1, total_tokens=100, warmup_tokens=10, learning_rate=0.3, min_lr=0.07)
    for schedule, frac in (("cosine", 0.2), ("wsd", 0.2), ("wsd", 1.0)):
        lr = [train.get_lr(dataclasses.replace(cfg, schedule=schedule, decay_frac=frac), s) for s in range(100)]
        assert lr[0] == 0.3 / 11 and lr[9] == 0.3 * 10 / 11 and lr[10] == 0.3 and lr[99] == 0.07
        assert all(a >= b for a, b in zip(lr[10:], lr[11:]))
        if frac == 0.2 and schedule == "wsd":
            assert lr[79] == 0.3 > lr[80] and abs(lr[89] - 0.185) < 1e-15
        elif schedule == "cosine":
            assert abs(train.get_lr(dataclasses.replace(cfg, total_tokens=101), 55) - 0.185) < 1e-15 # half-way
    never = dataclasses.replace(cfg, schedule="wsd", decay_frac=0.0)
    assert train.get_lr(never, 99) == 0.3
    for steps in (1, 2): # a run of one step, one that ends at the top of its warm-up
        one = dataclasses.replace(cfg, total_tokens=steps, warmup_tokens=steps - 1)
        assert train.get_lr(one, steps - 1) == 0.3

def batches(cfg, splits, steps, world=1):
    """The global batches of `steps`, each its row numbers, sorted."""
    n = splits["train"].first[-1]
    micro_steps = cfg.batch_tokens // (cfg.batch_size * cfg.seq_len * world)
    for step in steps:
        parts = [train.train_rows(cfg, n, step, m, rank, world) for m in range(micro_steps) for rank in range(world)]
        yield sorted(sum(parts, []))

def test_batches_are_a_pure_function(shards):
    cfg = config.load(train.TrainConfig, [*SMALL, f"--data_dir={shards}"])
    splits = train.open_data(cfg)[1]
    assert splits["train"].first == [0, 93, 155] and splits["val"].first == [0, 31]
    one = list(batches(cfg, splits, range(60)))
    for flag, world in (("--batch_size=2", 1), ("--batch_size=4", 2), ("--batch_size=1", 8)):
        other = config.load(train.TrainConfig, [*SMALL, f"--data_dir={shards}", flag])
        assert list(batches(other, splits, range(60), world)) == one # three epochs, so any later step too
    rows = [r for batch in one for r in batch]
    assert set(rows) == set(range(155)) # nothing is left out
    order = [r for s in range(40) for r in train.train_rows(cfg, 155, s, 0, 0, 1)]
    assert sorted(order[:155]) == sorted(order[155:310]) == list(range(155)) and order[:155] != order[155:310]
    train.row_order.cache_clear()
    assert [train.train_rows(cfg, 155, s, 0, 0, 1) for s in (39, 0)] == [order[312:320], order[:8]] # in any order
    other = dataclasses.replace(cfg, seed=1)
    assert train.train_rows(other, 155, 0, 0, 0, 1) != order[:8]

def test_rows_are_the_shards(shards):
    """Every token of a shard is a target once, but its first and the last that fill no row; eot starts a segment."""
    cfg = config.load(train.TrainConfig, [*SMALL, f"--data_dir={shards}"])
    split = train.open_data(cfg)[1]["train"]
    for shard, rows in enumerate((range(93), range(93, 155))):
        tokens = np.fromfile(os.path.join(shards, f"train_{shard:05d}.bin"), "<u2")[:len(rows) * 32 + 1]
        idx, targets, ids = train.get_batch(cfg, split, list(rows), 32)
        assert idx.flatten().tolist() == tokens[:-1].tolist() and targets.flatten().tolist() == tokens[1:].tolist()
        assert ids.dtype == torch.int32 and torch.equal(ids, (idx == 256).cumsum(1))
    assert train.get_batch(dataclasses.replace(cfg, reset_at_eot=False), split, [0], 32)[2] is None

def test_curriculum_repeats_nothing(shards, tmp_path):
    """Rows of 8, then 16, then 32 tokens over the warm-up: the same tokens in the same steps."""
    cfg = config.load(train.TrainConfig, [*SMALL, f"--data_dir={shards}", "--seq_len_start=8", "--warmup_tokens=1536"])
    split = train.open_data(cfg)[1]["train"]
    assert [train.get_seq_len(cfg, s) for s in range(8)] == [8, 8, 8, 16, 16, 16, 32, 32]
    for T in (8, 16, 32):
        idx, targets, ids = train.get_batch(cfg, split, [5, 100], T)
        whole = train.get_batch(cfg, split, [5, 100], 32)
        assert idx.shape == targets.shape == ids.shape == (64 // T, T)
        assert torch.equal(idx.flatten(), whole[0].flatten()) and torch.equal(targets.flatten(), whole[1].flatten())
        assert torch.equal(ids.diff(dim=1) > 0, (idx == 256)[:, 1:])
    p = start(shards, tmp_path / "out", "--seq_len_start=8", "--warmup_tokens=1536", "--max_steps=8")
    assert p.returncode == 0, p.stderr
    assert log_of(tmp_path / "out")[8]["tokens"] == 2048

def test_validation_rows_do_not_depend_on_ranks_or_batch(shards):
    """16 of 31 rows, in batches with a remainder, equal the mean over the rows one by one."""
    cfg = config.load(train.TrainConfig, [*SMALL, f"--data_dir={shards}", "--batch_size=7", "--eval_tokens=512"])
    split = train.open_data(cfg)[1]["val"]
    torch.manual_seed(0)
    model = train.LM(cfg)
    state = torch.random.get_rng_state()
    loss = train.evaluate(cfg, model, split, 0, 1, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        each = [model(*train.get_batch(cfg, split, [i * 31 // 16], 32))[1].item() for i in range(16)]
    assert abs(loss - sum(each) / 16) < 1e-6

def test_wandb_offline_keeps_its_run(shards, tmp_path):
    pytest.importorskip("wandb")
    out, env = tmp_path / "out", {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for flags in (("--max_steps=5",), ("--resume=True", "--max_steps=10")):
        p = start(shards, out, "--wandb=True", *flags, env=env)
        assert p.returncode == 0, p.stderr
    runs = [f.name.split("-")[-1] for f in (out / "wandb").glob("offline-run-*")]
    assert runs == [train.load_checkpoint(str(out))[0]["run_id"]] * 2, runs

def test_train_help():
    p = run("train.py", "--help")
    assert p.returncode == 0 and "  batch_tokens: int = 524288" in p.stdout and "  mixer: str = 'gla'" in p.stdout

# ----------------------------------------------------------------------------------------------------------------------
# sample.py

# ----------------------------------------------------------------------------------------------------------------------
# bench.py
