"""
The scripts as their users run them: subprocesses, real files, kills, two ranks on gloo, exit codes and messages.

    pytest test_scripts.py                                      # CPU
    TIKTOKEN_CACHE_DIR=DIR pytest test_scripts.py               # also what needs the GPT-2 vocabulary offline
"""
import dataclasses
import fcntl
import hashlib
import importlib.util
import inspect
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard

import config
import train
from prepare import data_name, load_tokenizer, local_files

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

BESIDE = []

def beside(test):
    """
    For long tests that compute in processes of their own alone: they run in threads from this file's first test on,
    beside the others of both files, which change what is global to torch (default dtype, seed, determinism).
    """
    BESIDE.append(test)
    def wait(running):
        running[test.__name__].result() # raises what the test raised
    wait.__name__, wait.__doc__, wait.beside = test.__name__, test.__doc__, True # conftest.py puts it last
    return wait

@pytest.fixture(scope="session", autouse=True)
def running(request, tmp_path_factory):
    """{name: future} of the tests marked `beside`, of those that this run of pytest has chosen."""
    chosen = {item.name for item in request.session.items if not any(m.args[0] for m in item.iter_markers("skipif"))}
    # two, so that no core is idle at the end; the main thread's tests, which are as long, go first (Linux: by thread)
    pool = ThreadPoolExecutor(2, initializer=os.nice, initargs=(5,))
    def fixture(test, name):
        return tmp_path_factory.mktemp(test.__name__) if name == "tmp_path" else request.getfixturevalue(name)
    yield {test.__name__: pool.submit(test, *[fixture(test, name) for name in inspect.signature(test).parameters])
           for test in BESIDE if test.__name__ in chosen}
    pool.shutdown(cancel_futures=True)

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

@pytest.mark.parametrize("name", sorted(p.stem for p in pathlib.Path(ROOT, "config").glob("[!_]*.py")))
def test_config_files(name):
    """Every config loads, passes the checks on its GPUs, and the 340M ones have their parameters."""
    cfg = config.load(train.TrainConfig, [os.path.join(ROOT, "config", name + ".py")])
    train.check(cfg, 8 if "340m" in name else 1)
    if "340m" in name:
        assert (cfg.seq_len, cfg.batch_size, cfg.batch_tokens, cfg.expect_params) == (2048, 32, 524_288, 340_000_000)
        assert (cfg.data_dir, cfg.out_dir) == ("data/slimpajama-gpt2", "out/" + name)
        with torch.device("meta"):
            assert abs(train.LM(cfg).num_params() / 340e6 - 1) < 0.01
    if "paper" in name: # what the papers print
        assert (cfg.learning_rate, cfg.min_lr, cfg.weight_decay, cfg.grad_clip) == (3e-4, 3e-5, 0.01, 1.0)
        assert (cfg.schedule, cfg.muon_lr, cfg.zero_out) == ("cosine", 0, False)
        assert (cfg.total_tokens, cfg.warmup_tokens) == (15_000_000_000, 500_000_000)

# ----------------------------------------------------------------------------------------------------------------------
# prepare.py

SHARED = os.path.join(ROOT, "..", "shared") # not part of the repository: what needs it is skipped where it is missing
TINY = os.path.join(SHARED, "corpus_tiny", "example_train_0.jsonl") # 143 documents, 1 MB
VOCABULARY = os.path.join(SHARED, "tiktoken_cache")
if os.path.isdir(VOCABULARY):
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", VOCABULARY)
needs_gpt2 = pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 vocabulary offline")
WORDS = "state decay gate key value query chunk kernel über 雪 don't\n\n  indent 12345 {x: 1}\t".split(" ")

def texts(n, seed=0, words=200):
    """n different documents, 1 to 2 * words words each."""
    draw = random.Random(seed)
    return [f"{i} " + " ".join(draw.choices(WORDS, k=draw.randint(1, 2 * words))) for i in range(n)]

def jsonl(path, documents):
    """Writes a .jsonl, or a .jsonl.zst in frames of 50 documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "meta": {"n": 1}}).encode() + b"\n" for text in documents]
    if path.suffix == ".zst":
        frames = [b"".join(lines[i:i + 50]) for i in range(0, len(lines), 50)]
        path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames))
    else:
        path.write_bytes(b"".join(lines))
    return path

def prepare(dataset, out, *flags, **kwargs):
    return run("prepare.py", f"--dataset={dataset}", f"--out_dir={out}", "--num_proc=1", *flags, **kwargs)

def prepared(dataset, out, *flags, **kwargs):
    """A run that has to succeed; returns meta.json."""
    p = prepare(dataset, out, *flags, **kwargs)
    assert p.returncode == 0 and not p.stderr, (p.stdout, p.stderr)
    assert not [name for name in os.listdir(out) if name.endswith(".tmp") or name == "progress.json"]
    return json.loads((out / "meta.json").read_text())

def tokens_of(out, split):
    names = sorted(out.glob(f"{split}_*.bin"))
    assert [name.name for name in names] == [f"{split}_{i:05d}.bin" for i in range(len(names))]
    return np.concatenate([np.fromfile(name, "<u2") for name in names]) if names else np.zeros(0, "<u2")

def documents_of(out, split):
    """The documents of a folder as texts, from the shards alone."""
    meta = json.loads((out / "meta.json").read_text())
    enc, tokens = load_tokenizer(meta["tokenizer"]), tokens_of(out, split)
    assert len(tokens) == meta[f"{split}_tokens"]
    if not len(tokens):
        return []
    starts = np.flatnonzero(tokens == meta["eot"])
    assert starts[0] == 0 and len(starts) == meta[f"{split}_documents"]
    return [enc.decode_bytes(part[1:].tolist()).decode() for part in np.split(tokens, starts[1:])]

def files_of(out):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}

@pytest.fixture(scope="session")
def stdlib_data(tmp_path_factory):
    """data/stdlib-bytes as `python prepare.py` makes it."""
    cwd = tmp_path_factory.mktemp("stdlib")
    p = run(os.path.join(ROOT, "prepare.py"), cwd=cwd)
    assert p.returncode == 0 and not p.stderr, (p.stdout, p.stderr)
    return cwd / "data" / "stdlib-bytes"

def test_prepare_default_is_the_standard_library(stdlib_data):
    meta = json.loads((stdlib_data / "meta.json").read_text())
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot"], meta["dataset"]) == ("bytes", 257, 256, "stdlib")
    assert meta["revision"] == ".".join(map(str, sys.version_info[:3]))
    train, val = documents_of(stdlib_data, "train"), documents_of(stdlib_data, "val")
    found = [open(os.__file__, newline="").read(), open(json.__file__, newline="").read()]
    assert all(text in train + val for text in found)
    assert len(set(train + val)) == len(train + val) > 300 # no duplicates, and so no validation text in train
    assert meta["val_tokens"] > 30_000
    counts = np.bincount(tokens_of(stdlib_data, "val"))
    p = counts[counts > 0] / counts.sum()
    assert abs(meta["unigram_nats"] + (p * np.log(p)).sum()) < 1e-5
    for name, shard in meta["shards"].items():
        data = (stdlib_data / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (2 * shard["tokens"], shard["sha256"])

def test_prepare_complete_folder(stdlib_data, tmp_path):
    script, cwd, before = os.path.join(ROOT, "prepare.py"), stdlib_data.parents[1], files_of(stdlib_data)
    p = run(script, cwd=cwd)
    assert p.returncode == 0 and "complete already" in p.stdout and files_of(stdlib_data) == before
    refused(run(script, "--val_tokens=5", cwd=cwd), "val_tokens", "10000000", "5", "--out_dir")
    assert run(script, "--verify=True", cwd=cwd).returncode == 0
    copy = tmp_path / "copy"
    shutil.copytree(stdlib_data, copy)
    data = bytearray((copy / "train_00000.bin").read_bytes())
    data[len(data) // 2] ^= 4
    (copy / "train_00000.bin").write_bytes(data)
    refused(run(script, "--verify=True", f"--out_dir={copy}"), "train_00000.bin", "altered")
    (copy / "train_00000.bin").write_bytes(data[:-2])
    refused(run(script, "--verify=True", f"--out_dir={copy}"), "train_00000.bin", "altered")
    (copy / "train_00000.bin").unlink()
    refused(run(script, "--verify=True", f"--out_dir={copy}"), "train_00000.bin", "missing")
    refused(run(script, "--verify=True", f"--out_dir={tmp_path}"), "meta.json: missing", "finished")
    (tmp_path / "meta.json").write_text('{"shards": {}}')
    refused(run(script, "--verify=True", f"--out_dir={tmp_path}"), "meta.json: not prepare.py's")

def test_prepare_every_format_gives_the_same_documents(tmp_path):
    documents = texts(60)
    jsonl(tmp_path / "a" / "a.jsonl", documents)
    jsonl(tmp_path / "b" / "b.jsonl.zst", documents)
    table = pyarrow.table({"text": documents, "n": list(range(60))})
    (tmp_path / "c").mkdir(), (tmp_path / "d").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "c" / "c.parquet", row_group_size=7)
    for i, text in enumerate(documents):
        (tmp_path / "d" / f"{i:03d}.txt").write_bytes(text.encode())
    (tmp_path / "d" / "README.md").write_text("not a document")
    shards = [prepared(tmp_path / source, tmp_path / f"{source}.out")["shards"] for source in "abcd"]
    assert shards[0] == shards[1] == shards[2] == shards[3]
    out = tmp_path / "a.out"
    assert sorted(documents_of(out, "train") + documents_of(out, "val")) == sorted(documents)
    assert len(documents_of(out, "val")) == 1 # at least one, though none of these is 1 in 200
    meta = prepared(tmp_path / "*" / "[ab].jsonl*", tmp_path / "雪", env={"PYTHONIOENCODING": "ascii"})
    assert (meta["train_documents"], meta["val_documents"]) == (118, 2) # both copies of one text
    p = run(os.path.join(ROOT, "prepare.py"), "--dataset=a", "--num_proc=1", cwd=tmp_path)
    assert p.returncode == 0 and (tmp_path / "data" / "a-bytes" / "meta.json").exists()

def test_prepare_slimpajama_layout_and_limits(tmp_path):
    train, val, source = texts(300, 1), texts(20, 2), tmp_path / "corpus"
    for i in range(3):
        jsonl(source / "train" / "chunk1" / f"example_train_{i}.jsonl.zst", train[100 * i:100 * i + 100])
    jsonl(source / "validation" / "chunk1" / "example_holdout_0.jsonl.zst", val)
    jsonl(source / "test" / "chunk1" / "example_holdout_0.jsonl.zst", texts(20, 3))
    meta = prepared(source, tmp_path / "all", "--shard_tokens=30000")
    assert documents_of(tmp_path / "all", "train") == train and documents_of(tmp_path / "all", "val") == val
    *whole, last = [shard["tokens"] for name, shard in meta["shards"].items() if name.startswith("train")]
    assert set(whole) == {30_000} and 0 < last <= 30_000 and len(whole) > 5
    assert meta["train_bytes"] == sum(len(text.encode()) for text in train)
    # limits count tokens, and cut the last document
    cut = prepared(source, tmp_path / "cut", "--total_tokens=70001", "--val_tokens=1000", "--shard_tokens=30000")
    assert (cut["train_tokens"], cut["val_tokens"]) == (70_001, 1_000)
    assert (tokens_of(tmp_path / "cut", "train") == tokens_of(tmp_path / "all", "train")[:70_001]).all()
    assert cut["val_bytes"] == 1000 - cut["val_documents"] and cut["train_bytes"] == 70_001 - cut["train_documents"]
    more = tmp_path / "more"
    run("prepare.py", f"--dataset={source}", f"--out_dir={more}", "--num_proc=3", "--shard_tokens=30000")
    assert files_of(more) == files_of(tmp_path / "all") # whatever the number of workers

def test_prepare_draws_validation_by_hash(tmp_path):
    documents = texts(4000, words=3)
    jsonl(tmp_path / "a" / "0.jsonl", documents + documents[:1000])
    prepared(tmp_path / "a", tmp_path / "out")
    train, val = documents_of(tmp_path / "out", "train"), documents_of(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(documents + documents[:1000])
    assert not set(train) & set(val)
    assert 8 <= len(set(val)) <= 36 # 20 expected, standard deviation 4.5
    jsonl(tmp_path / "a" / "1.jsonl", texts(300, 1)) # more data moves no document
    prepared(tmp_path / "a", tmp_path / "out2")
    assert set(val) <= set(documents_of(tmp_path / "out2", "val"))
    assert not set(train) & set(documents_of(tmp_path / "out2", "val"))
    refused(prepare(tmp_path / "a", tmp_path / "out"), "source files", "--out_dir") # not those it was made of

TRICKY = {
    "spaces": " " * 10**6, "spaces before text": " " * 10**6 + "end", "spaces inside": "a" + " " * 2_500_000 + "\nb",
    "lines before text": "\n" * 10**6 + "end", "wide spaces": "\u3000\t" * 600_000 + "end", "one letter": "a" * 10**6,
    "one symbol": "^" * 10**6, "lone surrogate": "a\ud800b\udfffc", "pair of surrogates": "\U0001f600", "empty": "",
    "special": "<|endoftext|> and <|endoftext|>", "minified": "function(a,b){return a[b]||{}};" * 70_000, # 2 MB
    "letters without space": "abcdefghij" * 100_000, "null": "\0\x85\x1c\r\n", "digits": "0123456789" * 100_000}

@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
def test_prepare_encodes_any_text(tmp_path, tokenizer):
    documents = [text for pair in zip(TRICKY.values(), texts(len(TRICKY))) for text in pair]
    jsonl(tmp_path / "train" / "a.jsonl", documents)
    jsonl(tmp_path / "validation" / "a.jsonl", ["x"])
    start = time.time()
    prepared(tmp_path, tmp_path / "out", f"--tokenizer={tokenizer}")
    assert time.time() - start < 40
    got = documents_of(tmp_path / "out", "train")
    assert got == [re.sub("[\ud800-\udfff]", "\ufffd", text) for text in documents]
    enc, tokens = load_tokenizer(tokenizer), tokens_of(tmp_path / "out", "train")
    parts = np.split(tokens, np.flatnonzero(tokens == enc.eot_token)[1:])
    for text, part in zip(documents, parts):
        if not re.search(r"\s{999999}", text):
            assert part[1:].tolist() == enc.encode_ordinary(text) # exactly tiktoken's

@needs_gpt2
def test_prepare_reads_large_text_in_pieces(tmp_path):
    text = "".join(texts(4000, 5)).replace("12345", "'s  \r\n")
    assert len(text) > 3 << 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"short")
    prepared(tmp_path / "*.txt", tmp_path / "out", "--tokenizer=gpt2")
    tokens = {split: tokens_of(tmp_path / "out", split)[1:].tolist() for split in ("train", "val")}
    enc = load_tokenizer("gpt2")
    assert sorted(tokens.values()) == sorted([enc.encode_ordinary(text), enc.encode_ordinary("short")])

def largest(*args):
    """Runs prepare.py; returns the peak memory of its largest process in bytes, and what it printed."""
    code = ("import resource, subprocess, sys; "
            "subprocess.run([sys.executable, 'prepare.py', *sys.argv[1:]], check=True); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    p = run("-c", code, *args) # a process between: what is forked from this one inherits its peak
    assert p.returncode == 0, (p.stdout, p.stderr)
    return int(p.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024), p.stdout

def test_prepare_memory_is_bounded(tmp_path):
    line = json.dumps({"text": "word " * 1000}).encode() + b"\n"
    packed = zstandard.ZstdCompressor().compress(line * 80_000) # 400 MB
    assert len(packed) < 100_000
    jsonl(tmp_path / "validation" / "a.jsonl", ["x"])
    (tmp_path / "train").mkdir()
    for name, content in (("a.jsonl.zst", packed), ("b.txt", b"word " * 40_000_000)): # b: one document of 200 MB
        (tmp_path / "train" / name).write_bytes(content)
        peak, _ = largest(f"--dataset={tmp_path}", f"--out_dir={tmp_path / 'out' / name}", "--total_tokens=2000000")
        (tmp_path / "train" / name).unlink()
        assert peak < 150e6

def frame():
    return zstandard.ZstdCompressor().compress(b'{"text": "a"}\n' * 9)

BAD = { # name of the file: what it holds, and words of the sentence
    "cut.jsonl.zst": (lambda: frame()[:-5], ["cut.jsonl.zst", "truncated"]),
    "second.jsonl.zst": (lambda: frame() + frame()[:-5], ["second.jsonl.zst", "truncated"]),
    "empty.jsonl.zst": (lambda: b"", ["empty.jsonl.zst", "truncated"]),
    "page.jsonl.zst": (lambda: b"<!doctype html><html>429</html>", ["page.jsonl.zst", "not a zstd file"]),
    "page.jsonl": (lambda: b"<!doctype html><html>429</html>", ["page.jsonl:1", "not a JSON record"]),
    "field.jsonl": (lambda: b'{"text": "a"}\n\n{"content": "a"}\n', ["field.jsonl:3", "'text'", "--text_field"]),
    "null.jsonl": (lambda: b'{"text": "a"}\n{"text": null}\n', ["null.jsonl:2", "'text'"]),
    "list.jsonl": (lambda: b'{"text": "a"}\n["text"]\n', ["list.jsonl:2"]),
    "string.jsonl": (lambda: b'"text"\n', ["string.jsonl:1"]),
    "torn.jsonl": (lambda: b'{"text": "a"}\n{"text": "b', ["torn.jsonl:2", "not a JSON record"]),
    "deep.jsonl": (lambda: b"[" * 100_000, ["deep.jsonl:1", "not a JSON record"]),
    "latin.jsonl": (lambda: '{"text": "café"}\n'.encode("latin-1"), ["latin.jsonl:1", "utf-8"]),
    "latin.txt": (lambda: "café".encode("latin-1"), ["latin.txt", "not UTF-8"]),
    "page.parquet": (lambda: b"<!doctype html><html>429</html>", ["page.parquet", "not a parquet file"]),
    "page_of.parquet": (lambda: flipped(parquet({"text": texts(500)})), ["page_of.parquet", "damaged"]),
    "latin.parquet": (lambda: parquet({"text": latin()}), ["latin.parquet", "utf-8"]),
    "column.parquet": (lambda: parquet({"content": ["a", "b"]}), ["column.parquet", "'text'", "content"]),
    "null.parquet": (lambda: parquet({"text": ["a", None]}), ["null.parquet, row 1", "'text'"]),
    "number.parquet": (lambda: parquet({"text": [1, 2]}), ["number.parquet, row 0", "'text'"]),
    "one.txt": (lambda: b"one document", ["one.txt", "two different documents"]),
    "same.jsonl": (lambda: b'{"text": "a"}\n' * 5, ["same.jsonl", "two different documents"]),
    "none.jsonl": (lambda: b"\n", ["none.jsonl", "two different documents"]),
    "void.jsonl": (lambda: b"", ["void.jsonl", "two different documents"]),
    "table.csv": (lambda: b"text\na\n", ["table.csv", ".parquet"])}

def parquet(columns):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()

def flipped(data):
    return data[:len(data) // 3] + bytes(255 - byte for byte in data[len(data) // 3:][:99]) + data[len(data) // 3 + 99:]

def latin():
    offsets = np.array([0, 4, 5], np.int32)
    return pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, *map(pyarrow.py_buffer, (offsets, b"caf\xe9x"))])

@pytest.mark.parametrize("name, layout", [ # validation drawn from the file, or a file beside it
    (name, layout) for name in BAD for layout in ("", "train")
    if not layout or name.split(".")[0] not in ("page_of", "latin", "one", "same", "none", "void", "table")])
def test_prepare_names_a_bad_file(tmp_path, name, layout):
    content, words = BAD[name]
    folder = tmp_path / "corpus" / layout
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content())
    if layout:
        jsonl(tmp_path / "corpus" / "validation" / "a.jsonl", ["x"])
    refused(prepare(tmp_path / "corpus" if layout else folder / name, tmp_path / "out"), *words)
    assert not (tmp_path / "out" / "meta.json").exists()

def test_prepare_names_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a[1]").mkdir()
    for dataset, name in (("a[1]", "a[1]"), ("a[1]/../a[1]/", "a[1]"), ("a/b/*.jsonl", "b"), ("a/b?/**/c.txt", "a"),
                          ("x.jsonl.zst", "x"), (".", tmp_path.name), ("someone/corpus", "corpus")):
        assert data_name(dataset) == name

def test_prepare_takes_files_only(tmp_path):
    (tmp_path / "a.parquet").mkdir() # as Spark writes it
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "a.parquet" / "part-0.parquet")
    assert list(map(os.path.basename, local_files(str(tmp_path))[1][""])) == ["part-0.parquet"]
    def dangling(path):
        os.symlink("nowhere", path)
    for make, words in ((os.mkfifo, "b.txt: a pipe"), (dangling, "b.txt: cannot be read")):
        make(tmp_path / "b.txt")
        with pytest.raises(SystemExit, match=words):
            local_files(str(tmp_path))
        os.remove(tmp_path / "b.txt")

@pytest.mark.parametrize("flags, words", [
    (["--dataset=no/such/folder/"], ["no/such/folder", "no such"]),
    (["--dataset=./nothing"], ["./nothing", ".jsonl"]),
    (["--dataset=nothing/*.jsonl"], ["nothing/*.jsonl"]),
    (["--dataset=nothing.jsonl.zst"], ["nothing.jsonl.zst"]),
    (["--dataset=config"], ["config", ".jsonl"]), # a folder without data
    (["--tokenizer=gpt3"], ["gpt3", "bytes or gpt2"]),
    (["--shard=2/2"], ["--shard=2/2", "i/n"]),
    (["--shard=first"], ["--shard=first", "i/n"]),
    (["--shard=0/5000"], ["--shard=0/5000", "training files"]),
    (["--total_tokens=0"], ["--total_tokens=0"]),
    (["--shard_tokens=-1"], ["--shard_tokens=-1"]),
    (["--num_proc=-1"], ["--num_proc=-1"]),
    (["--out_dir=prepare.py"], ["prepare.py"]),
    (["--tokeniser=gpt2"], ["tokeniser", "tokenizer"]),
    (["--merge=no/such"], ["no/such/meta.json", "finished"])])
def test_prepare_refuses(tmp_path, flags, words):
    refused(run("prepare.py", f"--out_dir={tmp_path}", "--num_proc=1", *flags, env={"HF_HUB_OFFLINE": "1"}), *words)

@beside
def test_prepare_without_network_or_package(tmp_path):
    jsonl(tmp_path / "a.jsonl.zst", texts(5))
    offline = {"HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"}
    refused(prepare("slimpajama", tmp_path / "out", env=offline), "slimpajama", "hub")
    refused(prepare("someone/nothing", tmp_path / "out", env=offline), "someone/nothing", "hub")
    refused(prepare(tmp_path / "a.jsonl.zst", tmp_path / "out", "--tokenizer=gpt2", env=offline), "TIKTOKEN_CACHE_DIR")
    for package, dataset in (("zstandard", tmp_path / "a.jsonl.zst"), ("datasets", "slimpajama")):
        blocked = f"import sys; sys.modules[{package!r}] = None; import prepare; prepare.main()"
        refused(run("-c", blocked, f"--dataset={dataset}", f"--out_dir={tmp_path / 'out'}"), f"pip install {package}")
    wide = ("import tiktoken; e = tiktoken.Encoding('gpt2', pat_str='.', mergeable_ranks={b'a': 0}, special_tokens="
            "{'<|endoftext|>': 65536}); tiktoken.get_encoding = lambda name: e; import prepare; prepare.main()")
    refused(run("-c", wide, "--tokenizer=gpt2", f"--out_dir={tmp_path / 'out'}"), "65536", "uint16")

@beside
def test_prepare_shards_and_merge(tmp_path):
    documents, source, out = texts(1000), tmp_path / "corpus", tmp_path / "data"
    for i in range(5):
        jsonl(source / f"{i}.jsonl", documents[200 * i:200 * i + 200])
    prepared(source, tmp_path / "one", "--shard_tokens=50000")
    for i in range(2):
        prepared(source, tmp_path / f"part{i}", "--shard_tokens=50000", f"--shard={i}/2")
    assert sorted(documents_of(tmp_path / "part1", "train") + documents_of(tmp_path / "part1", "val")) == sorted(
        documents[200:400] + documents[600:800])
    parts = [str(tmp_path / "part0"), str(tmp_path / "part1")]
    p = run(os.path.join(ROOT, "prepare.py"), f"--merge={parts[1]},{parts[0]}", cwd=tmp_path)
    assert p.returncode == 0 and not p.stderr, p.stderr
    merged, one = tmp_path / "data" / "corpus-bytes", tmp_path / "one"
    for split in ("train", "val"):
        assert sorted(documents_of(merged, split)) == sorted(documents_of(one, split))
        in_order = [text for part in parts for text in documents_of(pathlib.Path(part), split)]
        assert documents_of(merged, split) == in_order
    metas = [json.loads((folder / "meta.json").read_text()) for folder in (merged, one)]
    assert {k: v for k, v in metas[0].items() if k != "shards"} == {k: v for k, v in metas[1].items() if k != "shards"}
    assert [s["tokens"] for s in metas[0]["shards"].values()] == [s["tokens"] for s in metas[1]["shards"].values()]
    assert run("prepare.py", f"--out_dir={merged}", "--verify=True").returncode == 0
    # each machine makes its part of the tokens
    meta = prepared(source, tmp_path / "few", "--shard=1/2", "--total_tokens=2001", "--shard_tokens=50000")
    assert meta["train_tokens"] == 1001
    refused(run("prepare.py", f"--merge={parts[0]}", f"--out_dir={out}"), "part0", "--shard=0/1")
    refused(run("prepare.py", f"--merge={parts[0]},{parts[0]}", f"--out_dir={out}"), "part0", "--shard=1/2")
    refused(run("prepare.py", f"--merge={parts[0]},{tmp_path / 'few'}", f"--out_dir={out}"), "few", "--shard=1/2")
    data = bytearray((tmp_path / "part1" / "train_00000.bin").read_bytes())
    data[1000] ^= 1
    (tmp_path / "part1" / "train_00000.bin").write_bytes(data)
    refused(run("prepare.py", f"--merge={','.join(parts)}", f"--out_dir={out}"), "part1/train_00000.bin", "altered")
    assert not (out / "meta.json").exists()

# kills itself before or after its k-th rename or removal of a file
KILLED_AT = """
import os, signal, sys
import prepare
def counted(call):
    def wrapped(*args):
        global k
        k -= 1
        if k == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        call(*args)
        if k == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return wrapped
if __name__ == "__main__":
    k, after = int(sys.argv.pop(1)), sys.argv.pop(1) == "after"
    os.replace, os.remove = counted(os.replace), counted(os.remove)
    prepare.main()
"""

@pytest.mark.parametrize("source", ["drawn", "split"])
def test_prepare_killed_at_every_step(tmp_path, source):
    """Steps: progress.json, train shards, val shards, meta.json; the disk is as it was at each of them."""
    files, documents = tmp_path / "corpus", texts(420, words=40)
    if source == "drawn":
        jsonl(files / "a.jsonl.zst", documents[:300]), jsonl(files / "b.jsonl", documents[300:] * 2)
    else:
        jsonl(files / "train" / "a.jsonl", documents[:300]), jsonl(files / "validation" / "a.jsonl", documents[300:])
    flags = ["--shard_tokens=20000", "--tokenizer=bytes"]
    prepared(files, tmp_path / "whole", *flags)
    wrapper, out, runs = tmp_path / "wrapper.py", tmp_path / "out", 0
    wrapper.write_text(KILLED_AT)
    while not (out / "meta.json").exists() or (out / "progress.json").exists():
        k, when = [(2, "after"), (3, "before"), (4, "before"), (5, "after"), (6, "before"), (7, "after")][runs % 6]
        p = run(wrapper, k, when, f"--dataset={files}", f"--out_dir={out}", "--num_proc=1", *flags,
                env={"PYTHONPATH": ROOT})
        assert p.returncode in (0, -9) and "Traceback" not in p.stderr, p.stderr
        runs += 1
        assert runs < 20
    assert runs > 4
    prepared(files, out, *flags)
    assert files_of(out) == files_of(tmp_path / "whole")

def start(*args):
    return subprocess.Popen([sys.executable, "prepare.py", *map(str, args)], cwd=ROOT, start_new_session=True,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.002)

def test_prepare_killed_at_any_time(tmp_path):
    jsonl(tmp_path / "a.jsonl.zst", texts(3000))
    flags = f"--dataset={tmp_path / 'a.jsonl.zst'}", "--num_proc=2", "--shard_tokens=50000"
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run("prepare.py", *flags, f"--out_dir={whole}").returncode == 0
    shards, draw = len(list(whole.glob("*.bin"))), random.Random(1)
    assert shards > 20
    for goal in (0, 1, 5, 9, 14, 19): # shards there when it is killed
        p = start(*flags, f"--out_dir={out}")
        wait_for(lambda: p.poll() is not None or out.exists() and len(list(out.glob("*.bin"))) >= goal)
        time.sleep(0.05 * draw.random())
        workers = children(p.pid)
        p.kill()
        p.communicate()
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers)) # none is left behind
        assert not (out / "meta.json").exists() or goal > 15
    p = run("prepare.py", f"--out_dir={out}", *flags[:2], "--shard_tokens=60000")
    refused(p, "shard_tokens", "50000", "60000")
    p = run("prepare.py", *flags, f"--out_dir={out}")
    assert p.returncode == 0 and "going on after" in p.stdout
    assert files_of(out) == files_of(whole)

def test_prepare_interrupted_and_a_worker_killed(tmp_path):
    jsonl(tmp_path / "a.jsonl", texts(3000) * 4)
    flags = (f"--dataset={tmp_path / 'a.jsonl'}", f"--out_dir={tmp_path / 'out'}", "--num_proc=2",
             "--shard_tokens=50000")
    (tmp_path / "out").mkdir()
    lock = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    refused(run("prepare.py", *flags), "another run is writing there")
    os.close(lock)
    for worker_killed in (False, True):
        p = start(*flags)
        wait_for(lambda: len(list((tmp_path / "out").glob("*.bin"))) >= 5 + 5 * worker_killed)
        workers = children(p.pid)
        if worker_killed:
            named = [pid for pid in workers if "spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()]
            os.kill(named[0], signal.SIGKILL)
        else:
            os.killpg(p.pid, signal.SIGINT) # as a terminal does: to the workers too
        stdout, stderr = p.communicate(timeout=20)
        p = subprocess.CompletedProcess([], p.returncode, stdout, stderr)
        refused(p, "worker process was killed" if worker_killed else "interrupted")
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))

def test_prepare_on_a_full_disk(tmp_path):
    jsonl(tmp_path / "a.jsonl", texts(400))
    limited = ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
               "import prepare; prepare.main()")
    p = run("-c", limited, f"--dataset={tmp_path / 'a.jsonl'}", f"--out_dir={tmp_path / 'out'}", "--num_proc=1")
    refused(p, "File too large", "out")

# the hub, on files: fails like a 429 or a broken connection before certain documents, and on one opening
HUB = """
import json, os
import prepare

class Busy(Exception):
    response = type("Response", (), {"status_code": 429})()

def documents(paths):
    for path in paths:
        for n, line in enumerate(open(path)):
            if (path[-7:], n) in failures:
                failures.remove((path[-7:], n))
                raise ConnectionError("503") if n % 2 else Busy("429 Too Many Requests")
            yield json.loads(line)

def load_dataset(name, config, streaming, revision):
    assert (name, config, streaming, revision) == ("someone/corpus", "en", True, "abc")
    calls.append(name)
    if len(calls) == 1:
        raise Busy("429 Too Many Requests")
    make = datasets.IterableDataset.from_generator
    return {split: make(documents, gen_kwargs={"paths": paths}) for split, paths in splits.items()}

if __name__ == "__main__":
    import datasets # not in the workers
    splits, failures = json.loads(os.environ["SPLITS"]), list(map(tuple, json.loads(os.environ["FAILURES"])))
    calls = []
    prepare.time.sleep = lambda seconds: print("slept", seconds)
    datasets.load_dataset = load_dataset
    prepare.main()
"""

@beside
def test_prepare_streams_from_the_hub(tmp_path):
    train, val = [texts(60, i, words=4000) for i in range(4)], texts(10, 9) # 1.4 MB a file
    splits = {"train": [str(jsonl(tmp_path / f"{i}.jsonl", documents)) for i, documents in enumerate(train)]}
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(HUB)
    def hub(name, *flags, failures=()):
        env = {"PYTHONPATH": ROOT, "SPLITS": json.dumps(splits), "FAILURES": json.dumps(failures),
               "HF_HUB_OFFLINE": "1", "USE_TORCH": "0"} # without torch datasets is quicker to import
        return run(wrapper, "--dataset=someone/corpus", "--name=en", "--revision=abc", "--num_proc=1",
                   "--shard_tokens=200000", f"--out_dir={tmp_path / name}", *flags, env=env)
    def made(name, *flags, **kwargs):
        p = hub(name, *flags, **kwargs)
        assert p.returncode == 0 and not p.stderr, (p.stdout, p.stderr)
        return p.stdout, documents_of(tmp_path / name, "train"), documents_of(tmp_path / name, "val")

    output, calm, drawn = made("calm")
    assert output.count("slept") == 1 and "429 Too Many Requests" in output
    assert sorted(calm + drawn) == sorted(sum(train, [])) and not set(calm) & set(drawn) and drawn
    # busy at times, then down for good in the last file: gives up, and goes on from there the next time
    busy = [("0.jsonl", 7), ("0.jsonl", 8), ("2.jsonl", 0), ("2.jsonl", 0), ("2.jsonl", 0)]
    p = hub("down", failures=busy + [("3.jsonl", 50)] * 50)
    refused(p, "someone/corpus", "10 attempts", "again later")
    assert "slept 4" in p.stdout and p.stdout.rstrip().endswith("slept 64") and "ConnectionError: 503" in p.stdout
    assert "going on after" in made("down", failures=[("3.jsonl", 59)])[0]
    assert files_of(tmp_path / "down") == files_of(tmp_path / "calm")
    # the hub's own validation split, in fewer files than there are shards
    splits["validation"] = [str(jsonl(tmp_path / "v.jsonl", val))]
    assert made("part0", "--shard=0/2")[1:] == (train[0] + train[2], val)
    assert made("part1", "--shard=1/2")[1:] == (train[1] + train[3], [])
    refused(hub("x", "--split=test"), "test", "train")
    refused(hub("y", "--text_field=content"), "content", "--text_field")

@needs_gpt2
@pytest.mark.skipif(not os.path.isdir(os.path.join(SHARED, "corpus")), reason="no corpus beside the repository")
@beside
def test_prepare_whole_corpus(tmp_path):
    peak, output = largest(f"--dataset={SHARED}/corpus", "--tokenizer=gpt2", f"--out_dir={tmp_path}")
    assert peak < 300e6 # a process; two workers and theirs make less than 1.5 GB
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["train_tokens"], meta["train_documents"]) == (44_792_757 + 14_865, 14_865)
    assert (meta["val_tokens"], meta["val_documents"]) == (927_744 + 232, 232)
    assert "unigram entropy" in output and "MB/s" in output
    with zstandard.open(f"{SHARED}/corpus/validation/chunk1/example_holdout_0.jsonl.zst", "rt", encoding="utf-8") as f:
        assert documents_of(tmp_path, "val") == [json.loads(line)["text"] for line in f]

# ----------------------------------------------------------------------------------------------------------------------
# train.py

FLAGS = """--mixer=gdn --n_layer=1 --n_head=1 --n_embd=32 --d_key=16 --d_value=16 --d_mlp=32 --conv_size=4
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
        if fault == "compiler": # Ctrl-C while it compiles
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("g++ was ended by signal 2")
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

def letters(seed, tokens):
    """Documents of 4 to 59 letters, each a neighbour of the last in the alphabet: there is something to learn."""
    rng, ids = np.random.default_rng(seed), []
    while len(ids) < tokens:
        ids += [256, *(97 + rng.choice([-1, 1], rng.integers(4, 60)).cumsum() % 26)]
    return [int(i) for i in ids[:tokens]]

@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Two training shards of 93 and 62 rows of 32 tokens, a validation shard of 31."""
    return write_shards(tmp_path_factory.mktemp("data") / "letters", [letters(0, 3000), letters(1, 2000)],
                        [letters(2, 1000)])

@pytest.fixture(scope="session")
def faulty(tmp_path_factory):
    path = tmp_path_factory.mktemp("faulty") / "faulty.py"
    path.write_text(FAULTY)
    return str(path)

@pytest.fixture(scope="session")
def whole(shards, tmp_path_factory):
    """out_dir of the run that the others are compared with: one rank, never stopped, evaluated every 5 steps."""
    out = tmp_path_factory.mktemp("whole") / "out"
    p = run("train.py", *FLAGS, f"--data_dir={shards}", f"--out_dir={out}", "--eval_interval=5", "--save_interval=1")
    assert p.returncode == 0, p.stderr
    assert "asked to stop" not in p.stdout and "first step" in p.stdout
    return out

def trained(shards, out, *flags, prefix=(), env=None, timeout=300):
    """train.py with FLAGS's settings, `prefix` before it (torchrun, faulty.py); its log afterwards is log_of(out)."""
    return run(*prefix, "train.py", *FLAGS, f"--data_dir={shards}", f"--out_dir={out}", *flags,
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

def same_checkpoint(a, b):
    """Weights and moments to the last bit."""
    assert all(torch.equal(a["model"][name], x) for name, x in b["model"].items())
    assert len(a["optimizer"]["state"]) == len(b["optimizer"]["state"]) == len(b["model"])
    for i, state in b["optimizer"]["state"].items():
        assert all(torch.equal(a["optimizer"]["state"][i][key], x) for key, x in state.items()), i

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

@beside
def test_evaluation_does_not_change_training(shards, whole, tmp_path):
    """And keep=2 keeps two; one evaluation a run, at its end, is the one of the run with four."""
    p = trained(shards, tmp_path / "out", "--eval_interval=0", "--keep=2")
    assert p.returncode == 0, p.stderr
    same_curve(log_of(tmp_path / "out"), log_of(whole))
    assert log_of(tmp_path / "out")[20]["val_loss"] == log_of(whole)[20]["val_loss"]
    assert sorted(f.name for f in (tmp_path / "out").glob("ckpt*")) == ["ckpt_15.pt", "ckpt_20.pt"]
    lock = os.open(tmp_path / "out", os.O_RDONLY) # while a run trains there, and saves
    fcntl.flock(lock, fcntl.LOCK_EX)
    (tmp_path / "out" / "ckpt_25.pt.tmp").touch()
    p = trained(shards, tmp_path / "out", "--eval_only=True")
    assert p.returncode == 0 and f"val_loss {log_of(whole)[20]['val_loss']:.4f}" in p.stdout
    assert (tmp_path / "out" / "ckpt_25.pt.tmp").exists()
    refused(trained(shards, tmp_path / "out", "--resume=True"), "another run", "another out_dir")
    os.close(lock)
    p = trained(shards, tmp_path / "out", "--resume=True", "--n_embd=64")
    refused(p, "n_embd=32", "n_embd=64")
    torch.save({"model": {}}, tmp_path / "out" / "ckpt_30.pt") # someone else's
    refused(trained(shards, tmp_path / "out", "--resume=True"), "ckpt_30.pt does not fit")
    refused(trained(shards, tmp_path / "out"), "holds checkpoints", "--resume=True")

def loaded(cfg, checkpoint):
    """The checkpoint's model, made without random numbers: the test in another thread may just have seeded them."""
    with torch.device("meta"):
        model = train.LM(cfg)
    model.load_state_dict(checkpoint["model"], assign=True)
    return model.requires_grad_(False)

def test_loss_by_position(shards, whole, tmp_path):
    """eval_only on two ranks against a loop over documents: one ends a row, one began before it, some are too short."""
    text = iter(letters(3, 4000))
    document = lambda n: [256, *(next(x for x in text if x != 256) for _ in range(n - 1))]
    val = [document(100) + document(128) + document(400),
           document(60)[1:] + document(127) + document(300) + document(99)]
    data, out = write_shards(tmp_path / "data", [letters(0, 3000)], val), tmp_path / "out"
    shutil.copytree(whole, out)
    saved, _ = train.load_checkpoint(str(out))
    cfg = train.TrainConfig(**{**saved["config"], "data_dir": data, "eval_tokens": 1024})
    model = loaded(cfg, saved)
    for reset in (True, False):
        cfg, expected = dataclasses.replace(cfg, reset_at_eot=reset), {128: [], 256: [], 512: []}
        for shard in val:
            row = torch.tensor(shard[:513])
            ids = (row[None, :-1] == 256).cumsum(1, dtype=torch.int32)
            logits = model(row[None, :-1], segment_ids=ids if reset else None)[0][0]
            losses = torch.nn.functional.cross_entropy(logits, row[1:], reduction="none").tolist()
            starts = [i for i in range(512) if row[i] == 256] if reset else [0]
            for start, stop in zip(starts, [*starts[1:], 512]):
                for first, end in ((0, 128), (128, 256), (256, 512)):
                    if stop - start >= end:
                        expected[end] += losses[start + first:start + end]
        meta, _ = train.open_data(cfg)
        got = train.loss_by_position(cfg, model, meta, 0, 1, torch.device("cpu"))
        assert [(end, n) for end, _, n in got] == [(end, len(x)) for end, x in expected.items() if x]
        assert len(got) == (2 if reset else 3) # with reset the third document of row 0 and of row 1 reach 256
        for end, loss, _ in got:
            assert abs(loss - np.mean(expected[end])) < 1e-5, (end, loss)
        if reset:
            flags = "--eval_only=True", f"--data_dir={data}", "--eval_tokens=1024", "--batch_size=4"
            p = trained(shards, out, *flags, prefix=ranks(2))
            line = f"position 128 to 256 in the document: loss {got[1][1]:.4f}"
            assert p.returncode == 0 and line in p.stdout, p.stdout + p.stderr
            *_, last = (out / "log.jsonl").read_text().splitlines()
            assert np.allclose(json.loads(last)["val_loss_by_position"], got, atol=1e-5)
    p = trained(shards, out, "--resume=True", "--max_steps=20") # the added record is none of a step
    assert p.returncode == 0, p.stderr

# runs the script that its arguments name, then prints the names of the threads that are left
THREADS = """
import os, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as error:
    assert not error.code, error.code
print("threads", *(open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")))
"""

@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_thread_of_the_process_group_outlives_it(shards, tmp_path):
    """At the interpreter's end such a thread aborts the process now and then, after all has been done."""
    (tmp_path / "threads.py").write_text(THREADS)
    for flag in ("--max_steps=2", "--eval_only=True"):
        p = trained(shards, tmp_path / "out", flag, prefix=(*ranks(1), tmp_path / "threads.py"))
        left = p.stdout.rpartition("threads ")[2]
        assert p.returncode == 0 and left and "gloo" not in left, p.stdout + p.stderr

def killed_twice(shards, out, faulty, *flags, prefix=(), **how):
    """A run killed with SIGKILL in its 8th step, again in the 5th of its second life, that then goes on to its end."""
    for step in (8, 5):
        p = trained(shards, out, "--resume=True", *flags, prefix=(faulty, "SIGKILL", 0, step), **how)
        assert p.returncode == -signal.SIGKILL, (p.returncode, p.stderr)
    with open(out / "log.jsonl", "a") as f:
        f.write('{"step": 10, "lo') # what a kill in the middle of a line leaves
    (out / "ckpt_99.pt.tmp").write_bytes(b"torn")
    p = trained(shards, out, "--resume=True", *flags, prefix=prefix, **how)
    assert p.returncode == 0 and f"continuing from {out}/ckpt_5.pt" in p.stdout, p.stderr
    assert not list(out.glob("*.tmp"))

@beside
def test_resume_is_bitwise(shards, whole, faulty, tmp_path):
    killed_twice(shards, tmp_path / "out", faulty, "--eval_interval=5")
    same_curve(log_of(tmp_path / "out"), log_of(whole))
    same_checkpoint(*(train.load_checkpoint(str(out))[0] for out in (tmp_path / "out", whole)))

@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for a CPU takes a C++ compiler")
@beside
def test_resume_is_bitwise_compiled(shards, faulty, tmp_path):
    """One cache for all: what is compared is the arithmetic, the embedding's gradient above all, not the compiler."""
    how = {"env": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}, "timeout": 900}
    flags = ("--compile=True", "--n_layer=2", "--conv_size=0", "--total_tokens=10240")
    # a SIGTERM at the end of step 20 of 40 spares the evaluation, whose graph would have to be compiled too
    p = trained(shards, tmp_path / "whole", *flags, prefix=(faulty, "SIGTERM", 0, 20), **how)
    assert p.returncode == 0, p.stderr
    killed_twice(shards, tmp_path / "out", faulty, *flags, prefix=(faulty, "SIGTERM", 0, 15), **how)
    assert list(log_of(tmp_path / "out")) == list(range(1, 22))
    same_curve(log_of(tmp_path / "out"), log_of(tmp_path / "whole"))

def gradient(out):
    """Of the first step, from Adam's first moment, (1 - beta1) times it where nothing is clipped."""
    state = torch.load(os.path.join(out, "ckpt_1.pt"), weights_only=True)["optimizer"]["state"]
    return torch.cat([state[i]["exp_avg"].double().flatten() for i in sorted(state)])

@beside
def test_ranks_and_accumulation_change_nothing(shards, tmp_path):
    """A batch of 16 rows as 16, as 4 micro-steps of 4, and as 4 of 2 on each of 2 ranks, over 10 steps."""
    ways = {"one": (16, ()), "accumulated": (4, ()), "ranks": (2, ranks(2))}
    for name, (batch_size, prefix) in ways.items():
        p = trained(shards, tmp_path / name, f"--batch_size={batch_size}", "--batch_tokens=512", "--max_steps=10",
                  "--grad_clip=0", "--save_interval=1", "--warmup_tokens=512", "--learning_rate=1e-3", "--mixer=gla",
                  prefix=prefix)
        assert p.returncode == 0, p.stderr
    for name in ("accumulated", "ranks"):
        same_curve(log_of(tmp_path / name), log_of(tmp_path / "one"), 1e-5)
        a, b = gradient(tmp_path / name), gradient(tmp_path / "one")
        assert (a - b).norm() <= 1e-6 * b.norm(), (name, ((a - b).norm() / b.norm()).item())
        assert abs(log_of(tmp_path / name)[10]["val_loss"] / log_of(tmp_path / "one")[10]["val_loss"] - 1) < 1e-5

@beside
def test_two_nodes(shards, whole, tmp_path):
    """Two torchrun agents on this machine, one rank each, as two nodes would."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    agent = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
             f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=1")
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(trained, shards, tmp_path / "out", "--batch_size=4", "--eval_interval=5", prefix=agent)
                for _ in range(2)]
    for p in both:
        assert p.result().returncode == 0, p.result().stderr
    same_curve(log_of(tmp_path / "out"), log_of(whole), 1e-3)

@beside
def test_restart_after_a_killed_rank(shards, whole, faulty, tmp_path):
    p = trained(shards, tmp_path / "out", "--batch_size=4", "--resume=True", "--eval_interval=5",
              prefix=(*ranks(2), "--max-restarts=3", faulty, "SIGKILL", 1, 8))
    assert p.returncode == 0, p.stderr
    assert "starting at step 0" in p.stdout and "continuing from" in p.stdout
    same_curve(log_of(tmp_path / "out"), log_of(whole), 1e-3)

@beside
def test_sigterm_saves_and_exits_0(shards, faulty, tmp_path):
    """To one rank or to all; the step in which it comes is finished."""
    for who in ("1", "0,1"):
        p = trained(shards, tmp_path / who, "--batch_size=4", prefix=(*ranks(2), faulty, "SIGTERM", who, 7))
        assert p.returncode == 0, p.stderr
        assert "asked to stop: saved step" in p.stdout
        assert list(log_of(tmp_path / who))[-1] == train.load_checkpoint(str(tmp_path / who))[0]["step"] == 8

@pytest.mark.parametrize("tee", [False, True])
def test_sigint_from_outside(shards, tmp_path, tee):
    """A Ctrl-C, and more of them while it saves; and one that has ended the reader of its output as well."""
    p = subprocess.Popen([sys.executable, "train.py", *FLAGS, "--total_tokens=1_000_000_000", f"--data_dir={shards}",
                          f"--out_dir={tmp_path / 'out'}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in p.stdout:
        if line.startswith("step 3/"):
            break
    if tee:
        p.stdout.close()
        p.send_signal(signal.SIGINT)
        assert p.wait() == 0
    else:
        while p.poll() is None:
            p.send_signal(signal.SIGINT)
            time.sleep(0.01)
        # -SIGINT: one came after Python had taken its handlers down
        assert p.returncode in (0, -signal.SIGINT), p.returncode
        assert "asked to stop: saved step" in p.stdout.read()
    assert train.load_checkpoint(str(tmp_path / "out"))[0] is not None

def test_ctrl_c_before_the_first_step_ends_without_a_word(shards, tmp_path):
    p = subprocess.Popen([sys.executable, "-X", "importtime", "train.py", *FLAGS, f"--data_dir={shards}",
                          f"--out_dir={tmp_path / 'out'}"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    stderr = p.stderr.readline()
    while "numpy" not in stderr: # on its way through the imports
        stderr = p.stderr.readline()
    p.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" not in p.communicate()[1] and p.returncode == -signal.SIGINT

@beside
def test_nan_on_one_rank_drops_the_step(shards, whole, faulty, tmp_path):
    """On both ranks, without a trace in the moments; and the curve goes on."""
    p = trained(shards, tmp_path / "out", "--batch_size=4", "--save_interval=1",
                prefix=(*ranks(2), faulty, "nan", 1, 7))
    assert p.returncode == 0 and "1 steps dropped" in p.stdout, p.stderr
    log = log_of(tmp_path / "out")
    assert log[7]["loss"] is None and log[7]["grad_norm"] is None
    assert all(math.isfinite(log[s]["loss"]) for s in log if s != 7) and log[20]["loss"] < log[1]["loss"]
    assert [log[s]["skipped"] for s in (6, 7, 20)] == [0, 1, 1]
    same_curve({s: log[s] for s in range(1, 7)}, {s: log_of(whole)[s] for s in range(1, 7)}, 1e-3)
    before, after, end = (torch.load(tmp_path / "out" / f"ckpt_{s}.pt", weights_only=True) for s in (6, 7, 20))
    same_checkpoint(before, after)
    assert all(state["step"] == 19 for state in end["optimizer"]["state"].values())

@beside
def test_ten_dropped_steps_stop_the_run(shards, faulty, tmp_path):
    p = trained(shards, tmp_path / "out", prefix=(faulty, "nans", 0, 3))
    refused(p, "10 steps in a row by step 12", "learning_rate")
    assert list(log_of(tmp_path / "out"))[-1] == 11

@beside
def test_out_of_memory_says_what_to_lower(shards, faulty, tmp_path):
    cases = {(): "lower batch_size", ("--batch_size=1",): "checkpoint_blocks=True",
             ("--batch_size=1", "--checkpoint_blocks=True"): "lower seq_len"}
    runs = two_at_a_time(lambda *flags: trained(shards, tmp_path / "-".join(["out", *flags]), *flags,
                                                prefix=(faulty, "oom", 0, 2)), cases)
    for p, word in zip(runs, cases.values()):
        refused(p, "out of memory", word)

@beside
def test_ctrl_c_while_it_compiles(shards, faulty, tmp_path):
    p = trained(shards, tmp_path / "out", prefix=(faulty, "compiler", 0, 2))
    refused(p, "asked to stop", "RuntimeError", "resume")

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

@beside
def test_resume_falls_back_and_repeats_the_curve(shards, whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for step in range(11, 21):
        (out / f"ckpt_{step}.pt").write_bytes((out / f"ckpt_{step}.pt").read_bytes()[:-3000])
    p = trained(shards, out, "--resume=True", "--eval_interval=5")
    assert p.returncode == 0 and "ckpt_20.pt is damaged" in p.stdout and f"continuing from {out}/ckpt_10.pt" in p.stdout
    same_curve(log_of(out), log_of(whole))
    assert sorted(p.name for p in out.glob("*.damaged")) == [f"ckpt_{step}.pt.damaged" for step in range(11, 21)]
    out = out.rename(tmp_path / "雪")
    p = trained(shards, out, "--resume=True", "--max_steps=15", env={"PYTHONIOENCODING": "ascii"})
    assert p.returncode == 0 and "nothing is left to train: step 20 is done" in p.stdout
    assert list(log_of(out))[-1] == train.load_checkpoint(str(out))[0]["step"] == 20

@beside
def test_full_disk_keeps_the_last_checkpoint(shards, tmp_path):
    """The limit on a file's size stands for the full disk: the write fails half-way, as torch sees it too."""
    out = tmp_path / "out"
    p = trained(shards, out, "--max_steps=5")
    assert p.returncode == 0, p.stderr
    size = (out / "ckpt_5.pt").stat().st_size
    limited = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2},) * 2); " \
              "import sys; sys.argv = sys.argv[1:]; runpy.run_path('train.py', run_name='__main__')"
    p = trained(shards, out, "--resume=True", prefix=("-c", limited))
    refused(p, "cannot write", "ckpt_10.pt", "GB are free")
    assert [f.name for f in out.glob("ckpt*")] == ["ckpt_5.pt"] and train.load_checkpoint(str(out))[0]["step"] == 5

def altered(shards, folder, change):
    shutil.copytree(shards, folder)
    change(folder / "train_00001.bin")
    return folder

@beside
def test_damaged_shard_is_named(shards, tmp_path):
    """On whichever rank it is hashed; only rank 0 speaks."""
    for name, word, change in (
        ("shorter", "3998 bytes long, not 4000", lambda path: os.truncate(path, 3998)),
        ("altered", "altered", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1")),
    ):
        data = altered(shards, tmp_path / name, change)
        refused(trained(data, tmp_path / "out"), "train_00001.bin", word, "prepare.py")
    data = altered(shards, tmp_path / "removed", os.remove)
    p = trained(data, tmp_path / "out", "--batch_size=4", prefix=ranks(2))
    assert p.returncode == 1 and p.stderr.count("train_00001.bin cannot be read") == 1, p.stderr
    assert p.stderr.count("Traceback") == 1, p.stderr # torchrun's own
    assert not (tmp_path / "out").exists()

@beside
def test_train_refuses(shards, tmp_path):
    cases = {
        ("--data_dir=none",): ["none/meta.json is missing", "prepare.py"],
        ("--vocab_size=200",): ["ids up to 256", "vocab_size=200", "384"],
        ("--batch_size=3",): ["batch_tokens=256", "3 * 32 * 1 = 96"],
        ("--seq_len=1024", "--batch_size=1", "--batch_tokens=1024", "--total_tokens=10240"):
            ["val row", "lower seq_len"],
        ("--mixer=attention",): ["reset_at_eot=False"],
        ("--mixer=mamba",): ["gla, gdn, attention", "'mamba'"],
        ("--expect_params=20_000",): ["expect_params=20,000"],
        ("--eval_only=True",): ["no checkpoint to evaluate"],
        ("--out_dir=train.py/out",): ["train.py/out"],
    }
    runs = two_at_a_time(lambda *flags: trained(shards, tmp_path / "out", *flags), cases)
    for p, words in zip(runs, cases.values()):
        refused(p, *words)

@pytest.mark.parametrize("flag, words", [
    ("--schedule=linear", ["cosine or wsd"]), ("--decay_frac=1.5", ["decay_frac"]), ("--beta2=1.0", ["beta2"]),
    ("--seq_len=0", ["seq_len must be above 0"]), ("--learning_rate=-1.0", ["learning_rate"]), ("--seed=-1", ["seed"]),
    ("--learning_rate=nan", ["learning_rate"]), ("--total_tokens=100", ["total_tokens=100"]), ("--keep=-1", ["keep"]),
    ("--warmup_tokens=5120", ["warmup_tokens=5120"]), ("--seq_len_start=24", ["seq_len_start=24"]),
    ("--seq_len_start=64", ["seq_len_start=64"]), ("--log_interval=0", ["log_interval"]), ("--muon_lr=-1", ["muon_lr"]),
    ("--seq_len_start=8 --warmup_tokens=0", ["seq_len_start=8", "warm-up"]),
])
def test_settings_are_checked(flag, words):
    with pytest.raises(SystemExit) as e:
        train.check(config.load(train.TrainConfig, [*FLAGS, *flag.split()]), 1)
    assert all(word in e.value.code for word in words), e.value.code
    train.check(config.load(train.TrainConfig, FLAGS), 1)

@pytest.mark.parametrize("text", ["{", "1", "[]", '{"vocab_size": 257}', "\xff"])
def test_strange_meta_is_refused(tmp_path, text):
    (tmp_path / "meta.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit, match="meta.json is not prepare.py's"):
        train.open_data(train.TrainConfig(data_dir=str(tmp_path)))
    with pytest.raises(SystemExit, match="meta.json cannot be read"):
        train.open_data(train.TrainConfig(data_dir=__file__))

def test_log_keeps_records_and_nothing_else(tmp_path):
    lines = [b'{"config": {}}', b'{"step": 1, "skipped": 2}', b"7", b"[]", b'"step"', b'{"step": null}', b"\xff\0",
             b'{"step": 2, "val_loss": 1.0}', b'{"step": 3, "skipped": 4}', b'{"step": 2, "lo']
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines))
    log, last = train.open_log(str(tmp_path), {"config": 1}, 2)
    log.close()
    records = [json.loads(line) for line in open(tmp_path / "log.jsonl")]
    assert records == [{"config": 1}, {"step": 1, "skipped": 2}, {"step": 2, "val_loss": 1.0}] and last == records[1]

@pytest.mark.parametrize("change, words", [
    ({"d_key": 32}, ["d_key=16", "d_key=32"]), ({"batch_tokens": 512}, ["batch_tokens=256", "512"]),
    ({"muon_lr": 0.02}, ["muon_lr=0.0", "0.02"]),
    ({"tokenizer": "gpt2"}, ["bytes", "gpt2", "data_dir"])])
def test_resume_is_refused_where_it_would_be_another_run(change, words):
    cfg, meta = config.load(train.TrainConfig, FLAGS), {"tokenizer": change.pop("tokenizer", "bytes")}
    checkpoint = {"config": dataclasses.asdict(cfg), "tokenizer": "bytes"}
    assert train.check_resume(cfg, {"tokenizer": "bytes"}, checkpoint, "ckpt") == ""
    with pytest.raises(SystemExit) as e:
        train.check_resume(dataclasses.replace(cfg, **change), meta, checkpoint, "ckpt")
    assert all(word in e.value.code for word in words), e.value.code
    larger = dataclasses.replace(cfg, batch_tokens=512, batch_size=16, eval_only=True) # may be evaluated in any batch
    assert "batch_size 8 -> 16" in train.check_resume(larger, {"tokenizer": "bytes"}, checkpoint, "ckpt")

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

def matrix(m, n, smallest, seed):
    """(m, n) fp64, m <= n, with singular values from 1 down to `smallest`; and its polar factor U V^T."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((k, m)))[0] for k in (m, n))
    return torch.from_numpy((u * np.geomspace(1, smallest, m)) @ v.T), torch.from_numpy(u @ v.T)

@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.2), (torch.float32, 0.14)])
def test_orthogonalize(dtype, tolerance):
    """
    The polar factor, where every s is 0.004 of the norm or more, in the spectral norm: 0.13 is the polynomials';
    bf16 also rounds what is given, which turns the directions of small s.
    """
    for m, n, smallest in ((64, 64, 0.01), (64, 160, 0.01), (16, 512, 0.1), (1, 32, 1.0)):
        given, polar = zip(*(matrix(m, n, smallest, seed) for seed in range(3)))
        for scale in (1e-8, 1.0, 1e8):
            got = train.orthogonalize((scale * torch.stack(given)).to(dtype))
            assert got.dtype == dtype
            for x, y in zip(got.double(), polar):
                assert torch.linalg.matrix_norm(x - y, 2) < tolerance, (m, n, scale)
    assert not train.orthogonalize(torch.zeros(2, 4, 8, dtype=dtype)).any()

@pytest.mark.parametrize("mixer", ["gla", "gdn", "attention"])
def test_muon_step(mixer, monkeypatch):
    """Four steps, the third dropped, against Muon written out for one matrix at a time, and AdamW for the others."""
    cfg = train.ModelConfig(mixer=mixer, n_layer=2, n_head=2, n_embd=32, d_key=8, d_value=24, d_mlp=80, vocab_size=64)
    model = train.LM(cfg)
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = [2 * 8, 2 * 8, 2 * 24] # of q, k and v
    parts = {"in_proj": rows + [16] * (mixer == "gla"), "ab_proj": [2, 2]} # the others are one matrix
    inner = [name for name, p in named.items() if "proj.weight" in name]
    others = [torch.nn.Parameter(p.clone()) for name, p in named.items() if name not in inner]
    decayed = [p for p in others if p.ndim == 2]
    groups = [{"params": decayed}, {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)
    muon = train.Muon(model.optim_groups(0.1, 2.0), lr=0.01, fused=True) # at a learning rate of 0.02
    momentum = {name: torch.zeros_like(named[name], dtype=torch.float64) for name in inner}
    at_once, orthogonalize = [], train.orthogonalize
    monkeypatch.setattr(train, "orthogonalize", lambda x: at_once.append(len(x)) or orthogonalize(x))
    for step in range(4):
        dropped = step == 2
        rng = torch.Generator().manual_seed(step)
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=rng) * (math.nan if dropped else 1)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        for p, g in zip(others, (g for name, g in grads.items() if name not in inner)):
            p.grad = g
        adamw.found_inf = muon.found_inf = torch.tensor(float(dropped))
        adamw.step()
        muon.step()
        for name in inner if not dropped else []:
            g, m = grads[name].double(), momentum[name]
            m.mul_(0.95).add_(0.05 * g)
            u = 0.05 * g + 0.95 * m
            for p, x in zip(*(y.split(parts.get(name.split(".")[-2], [len(y)])) for y in (named[name], u))):
                tall = len(x) > x.shape[1]
                o = orthogonalize((x.T if tall else x)[None].float())[0]
                o = o.T if tall else o
                p.mul_(1 - 0.02 * 0.1).sub_(0.02 * 0.2 * max(p.shape) ** 0.5 * o)
    assert set(at_once) == {1} # never a number that depends on that of ranks
    plain = iter(others)
    for name, p in model.named_parameters():
        if name in inner:
            assert (p - named[name]).abs().max() < 1e-5 and muon.state[p]["step"] == 3, name
            assert torch.allclose(muon.state[p]["momentum"].double(), momentum[name], atol=1e-6), name
        else:
            assert torch.equal(p, next(plain)), name

@beside
def test_zero_out_starts_blocks_at_nothing(shards, tmp_path):
    """The first step of AdamW moves a weight by no more than its learning rate."""
    p = trained(shards, tmp_path / "out", "--zero_out=True", "--max_steps=1", "--learning_rate=1e-4")
    assert p.returncode == 0, p.stderr
    saved = train.load_checkpoint(str(tmp_path / "out"))[0]["model"]
    outs = [x for name, x in saved.items() if name.endswith("out_proj.weight")]
    others = [x for name, x in saved.items() if name.endswith("in_proj.weight")]
    assert len(outs) == 2 * len(others) and all(0 < x.abs().max() <= 1.01e-4 for x in outs)
    assert all(x.std() > 0.01 for x in others)

@beside
def test_muon_on_two_ranks_and_resumed(shards, faulty, tmp_path):
    """Killed twice: the same bits. Two ranks: those of one with two micro-steps, and a dropped step leaves no trace."""
    p = trained(shards, tmp_path / "whole", "--muon_lr=0.02")
    assert p.returncode == 0, p.stderr
    killed_twice(shards, tmp_path / "out", faulty, "--muon_lr=0.02")
    log = log_of(tmp_path / "whole")
    same_curve(log_of(tmp_path / "out"), log)
    same_checkpoint(*(train.load_checkpoint(str(tmp_path / name))[0] for name in ("out", "whole")))
    assert log[20]["val_loss"] < log[1]["loss"] - 0.5
    p = trained(shards, tmp_path / "halves", "--muon_lr=0.02", "--batch_size=4", "--max_steps=6")
    assert p.returncode == 0, p.stderr
    p = trained(shards, tmp_path / "ranks", "--muon_lr=0.02", "--batch_size=4", "--save_interval=1",
                prefix=(*ranks(2), faulty, "nan", 1, 7))
    assert p.returncode == 0 and "1 steps dropped" in p.stdout, p.stderr
    halves, six = log_of(tmp_path / "halves"), {s: log_of(tmp_path / "ranks")[s] for s in range(1, 7)}
    same_curve(six, {s: halves[s] for s in range(1, 7)})
    same_curve(six, {s: log[s] for s in range(1, 7)}, 1e-5)
    same_checkpoint(*(torch.load(tmp_path / "ranks" / f"ckpt_{s}.pt", weights_only=True) for s in (6, 7)))

def batches(cfg, splits, steps, world=1):
    """The global batches of `steps`, each its row numbers, sorted."""
    n = splits["train"].first[-1]
    micro_steps = cfg.batch_tokens // (cfg.batch_size * cfg.seq_len * world)
    for step in steps:
        parts = [train.train_rows(cfg, n, step, m, rank, world) for m in range(micro_steps) for rank in range(world)]
        yield sorted(sum(parts, []))

def test_batches_are_a_pure_function(shards):
    cfg = config.load(train.TrainConfig, [*FLAGS, f"--data_dir={shards}"])
    splits = train.open_data(cfg)[1]
    assert splits["train"].first == [0, 93, 155] and splits["val"].first == [0, 31]
    one = list(batches(cfg, splits, range(60)))
    for flag, world in (("--batch_size=2", 1), ("--batch_size=4", 2), ("--batch_size=1", 8)):
        other = config.load(train.TrainConfig, [*FLAGS, f"--data_dir={shards}", flag])
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
    cfg = config.load(train.TrainConfig, [*FLAGS, f"--data_dir={shards}"])
    split = train.open_data(cfg)[1]["train"]
    for shard, rows in enumerate((range(93), range(93, 155))):
        tokens = np.fromfile(os.path.join(shards, f"train_{shard:05d}.bin"), "<u2")[:len(rows) * 32 + 1]
        idx, targets, ids = train.get_batch(cfg, split, list(rows), 32)
        assert idx.flatten().tolist() == tokens[:-1].tolist() and targets.flatten().tolist() == tokens[1:].tolist()
        assert ids.dtype == torch.int32 and torch.equal(ids, (idx == 256).cumsum(1))
    assert train.get_batch(dataclasses.replace(cfg, reset_at_eot=False), split, [0], 32)[2] is None

@beside
def test_curriculum_repeats_nothing(shards, tmp_path):
    """Rows of 8, then 16, then 32 tokens over the warm-up: the same tokens in the same steps."""
    cfg = config.load(train.TrainConfig, [*FLAGS, f"--data_dir={shards}", "--seq_len_start=8", "--warmup_tokens=1536"])
    split = train.open_data(cfg)[1]["train"]
    assert [train.get_seq_len(cfg, s) for s in range(8)] == [8, 8, 8, 16, 16, 16, 32, 32]
    for T in (8, 16, 32):
        idx, targets, ids = train.get_batch(cfg, split, [5, 100], T)
        whole = train.get_batch(cfg, split, [5, 100], 32)
        assert idx.shape == targets.shape == ids.shape == (64 // T, T)
        assert torch.equal(idx.flatten(), whole[0].flatten()) and torch.equal(targets.flatten(), whole[1].flatten())
        assert torch.equal(ids.diff(dim=1) > 0, (idx == 256)[:, 1:])
    p = trained(shards, tmp_path / "out", "--seq_len_start=8", "--warmup_tokens=1536", "--max_steps=8",
                env={"PATH": str(tmp_path)}) # and without git
    assert p.returncode == 0, p.stderr
    assert log_of(tmp_path / "out")[8]["tokens"] == 2048

def test_validation_rows_do_not_depend_on_ranks_or_batch(shards):
    """16 of 31 rows, in batches with a remainder, equal the mean over the rows one by one."""
    cfg = config.load(train.TrainConfig, [*FLAGS, f"--data_dir={shards}", "--batch_size=7", "--eval_tokens=512"])
    split = train.open_data(cfg)[1]["val"]
    torch.manual_seed(0)
    model = train.LM(cfg)
    state = torch.random.get_rng_state()
    loss = train.evaluate(cfg, model, split, 0, 1, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        each = [model(*train.get_batch(cfg, split, [i * 31 // 16], 32))[1].item() for i in range(16)]
    assert abs(loss - sum(each) / 16) < 1e-6

@beside
def test_wandb_offline_keeps_its_run(shards, tmp_path):
    pytest.importorskip("wandb")
    out, env = tmp_path / "out", {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for flags in (("--max_steps=5",), ("--resume=True", "--max_steps=10")):
        p = trained(shards, out, "--wandb=True", *flags, env=env)
        assert p.returncode == 0, p.stderr
    runs = [f.name.split("-")[-1] for f in (out / "wandb").glob("offline-run-*")]
    assert runs == [train.load_checkpoint(str(out))[0]["run_id"]] * 2, runs

def test_train_help():
    p = run("train.py", "--help")
    assert p.returncode == 0 and "  batch_tokens: int = 524288" in p.stdout and "  mixer: str = 'gla'" in p.stdout

# ----------------------------------------------------------------------------------------------------------------------
# sample.py

SMALL = dict(n_layer=2, n_embd=32, n_head=2, d_key=8, d_value=8, d_mlp=48, vocab_size=320) # bytes use 257 of 320 ids
SMALL_MODELS = {"gla": dict(mixer="gla"), "gdn": dict(mixer="gdn", conv_size=4), "attention": dict(mixer="attention")}

def small_model(mixer, **changes):
    """A random model whose greedy choices depend on all that it has read."""
    from model import LM, ModelConfig
    torch.manual_seed(0)
    model = LM(ModelConfig(**{**SMALL, **SMALL_MODELS[mixer], **changes}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and "conv" not in name and "embed" not in name:
                p.mul_(10)
    return model.requires_grad_(False)

def save_checkpoint(folder, model, step=1, tokenizer="bytes"):
    """What train.py writes, as far as sample.py reads it."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"ckpt_{step}.pt")
    torch.save({"model": model.state_dict(), "config": dataclasses.asdict(model.cfg), "tokenizer": tokenizer,
                "step": step,
                "vocab_size": 257 if tokenizer == "bytes" else 50_257}, path)
    return path

@pytest.fixture(scope="session")
def outs(tmp_path_factory):
    """Folders that each hold a small model's checkpoint, by mixer."""
    root = tmp_path_factory.mktemp("out")
    for mixer in SMALL_MODELS:
        save_checkpoint(root / mixer, small_model(mixer))
    return root

def sample(out_dir, *flags, **kwargs):
    return run("sample.py", f"--out_dir={out_dir}", *flags, **kwargs)

def two_at_a_time(f, arguments):
    """[f(*a) for a in arguments], two processes at once: most of a run is importing torch."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda a: f(*a), arguments))

@pytest.mark.parametrize("mixer", SMALL_MODELS)
@torch.no_grad()
def test_greedy_decoding_equals_full_forwards(mixer):
    import sample
    model = small_model(mixer)
    for length in (1, 2, 3, 5, 64, 100):
        tokens = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        n = 256 if length == 5 else 32
        decoder = sample.Decoder(model, 1, 257, temperature=0, top_k=0, top_p=1, room=0)
        state, logits = sample.prefill(model, torch.tensor([tokens]))
        got = [token for token, in sample.generate(decoder, state, logits, n, eot=-1)]
        # at each position the likeliest token after those up to it: by induction what full forwards would have chosen
        full = model(torch.tensor([tokens + got[:-1]]))[0][0, length - 1:, :257].argmax(-1).tolist()
        assert got == full and len(got) == n and len(set(got)) >= 5, length

@pytest.mark.parametrize("mixer", SMALL_MODELS)
@torch.no_grad()
def test_prefill_in_pieces_equals_one_pass(mixer):
    import sample
    model = small_model(mixer)
    tokens = torch.randint(256, (2, 300), generator=torch.Generator().manual_seed(0))
    whole, logits = sample.prefill(model, tokens, piece=300)
    torch.testing.assert_close(logits, model(tokens)[0][:, -1], rtol=0, atol=1e-5)
    for piece in (64, 128, 37, 299):
        state, other = sample.prefill(model, tokens, piece)
        torch.testing.assert_close(other, logits, rtol=0, atol=1e-4)
        for a, b in zip(state, whole):
            for name in a.keys() - {"length", "k", "v"}:
                torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4)
                if piece % 64 == 0: # the same chunks, the same sums
                    assert torch.equal(a[name], b[name]), (name, piece)

@torch.no_grad()
def test_samples_do_not_disturb_each_other_and_memory_is_constant():
    import sample
    model = small_model("gdn")
    state, logits = sample.prefill(model, torch.tensor([[256, 65]]))
    size = sample.state_bytes(state)
    decoder = sample.Decoder(model, 1, 257, temperature=0, top_k=0, top_p=1, room=0)
    first = list(sample.generate(decoder, state, logits, 100, eot=-1))
    assert list(sample.generate(decoder, state, logits, 100, eot=-1)) == first
    assert sample.state_bytes(sample.prefill(model, torch.zeros(1, 500, dtype=torch.int64))[0]) == size
    assert sample.state_bytes(decoder.state) == size == 4 * 2 * (2 * 8 * 8 + 3 * 48) # fp32, 2 layers, S and conv

@pytest.mark.parametrize("mixer", SMALL_MODELS)
@torch.no_grad()
def test_a_batch_gives_each_row_its_own_tokens(mixer):
    """Whether its rows have different prompts, or are samples that share one."""
    from sample import Decoder, generate, prefill
    model = small_model(mixer)
    prompts = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))
    def greedy(tokens, rows, n=40):
        decoder = Decoder(model, rows, 257, temperature=0, top_k=0, top_p=1, room=0)
        return torch.tensor(list(generate(decoder, *prefill(model, tokens), n, eot=-1))).T.tolist()
    alone = [greedy(p[None], 1)[0] for p in prompts]
    assert greedy(prompts, 3) == alone and greedy(prompts[:1], 2) == [alone[0], alone[0]]
    eot = alone[0][5] # and a row that has ended stays so while the others go on
    decoder = Decoder(model, 3, 257, temperature=0, top_k=0, top_p=1, room=0)
    for row, got in enumerate(zip(*generate(decoder, *prefill(model, prompts), 40, eot))):
        length = (alone[row] + [eot]).index(eot)
        assert list(got) == alone[row][:length] + [None] * (len(got) - length)

def test_choose():
    from sample import choose
    torch.manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05]).repeat(20_000, 1)
    def shares(temperature=1.0, top_k=0, top_p=1.0):
        return torch.bincount(choose(p.log(), temperature, top_k, top_p)[:, 0], minlength=4) / len(p)
    def near(expected, **how):
        # 4 standard deviations
        torch.testing.assert_close(shares(**how), torch.tensor(expected).float(), rtol=0, atol=0.015)
    near([0.5, 0.3, 0.15, 0.05])
    near([0.5, 0.3, 0.15, 0.05], top_k=1000)
    near([0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365], temperature=0.5)
    near([0.625, 0.375, 0, 0], top_k=2)
    near([0.625, 0.375, 0, 0], top_p=0.6)
    near([1, 0, 0, 0], top_p=0.5)
    near([1, 0, 0, 0], top_p=1e-9)
    near([0.625, 0.375, 0, 0], top_k=3, top_p=0.6) # 0.526 of the three, then 0.316: both are needed
    for temperature in (0, 1e-30):
        assert shares(temperature=temperature).tolist() == [1, 0, 0, 0]

def test_padding_of_the_vocabulary_is_never_drawn(tmp_path):
    from sample import Decoder, generate, prefill
    model = small_model("gla")
    model.embed.weight[257:] *= 10 # the model's favourites
    state, logits = prefill(model, torch.tensor([[256]]))
    assert logits.argmax() >= 257
    for temperature in (0, 1.0, 5.0):
        decoder = Decoder(model, 1, 257, temperature, top_k=320, top_p=1, room=0)
        assert max(token for token, in generate(decoder, state, logits, 300, eot=-1)) < 257
    save_checkpoint(tmp_path, model)
    assert sample(tmp_path, "--temperature=5", "--top_k=0").returncode == 0

def test_sample_seeds_and_prompts(outs):
    flags = outs / "gdn", "--prompt=ab", "--max_new_tokens=60"
    first, again, other, two = two_at_a_time(sample, [(*flags, f"--seed={s}", f"--num_samples={n}")
                                                      for s, n in ((1, 1), (1, 1), (2, 1), (1, 2))])
    assert first.returncode == 0 and first.stdout.startswith("ab"), first.stderr
    assert first.stdout == again.stdout != other.stdout
    assert "prompt: 3 tokens" in first.stderr and "tok/s" in first.stderr and str(outs / "gdn") in first.stderr
    one, rule, rest = two.stdout.partition("-" * 80 + "\n")
    assert one.startswith("ab") and rest.startswith("ab") and one != rest

def test_sample_empty_prompt_and_top_k_beyond_the_vocabulary(outs):
    p = sample(outs / "gla", "--max_new_tokens=20", "--top_k=1000000", "--top_p=0.9")
    assert p.returncode == 0 and "prompt: 1 tokens" in p.stderr and p.stdout.strip(), p.stderr

def test_sample_reads_long_prompts_from_a_file(outs, tmp_path):
    rng = random.Random(0)
    text = "".join(rng.choice("abcdefgh \r\n") for _ in range(20_000 - 1))
    (tmp_path / "story.txt").write_text(text, newline="")
    flags = f"--prompt=@{tmp_path / 'story.txt'}", "--temperature=0", "--max_new_tokens=4"
    from model import ModelConfig
    from sample import Decoder, generate, prefill
    for mixer, p in zip(SMALL_MODELS, two_at_a_time(sample, [(outs / mixer, *flags) for mixer in SMALL_MODELS])):
        assert p.returncode == 0 and "prompt: 20,000 tokens" in p.stderr, p.stderr
        if mixer != "attention": # quadratic: seconds
            checkpoint, _ = train.load_checkpoint(str(outs / mixer))
            model = loaded(ModelConfig(**checkpoint["config"]), checkpoint)
            state, logits = prefill(model, torch.tensor([[256, *text.encode()]]), piece=20_000)
            tokens = generate(Decoder(model, 1, 257, 0, 0, 1, 0), state, logits, 4, eot=256)
            assert p.stdout == bytes(token for token, in tokens).decode(errors="replace") + "\n"

def test_sample_ends_at_eot(tmp_path):
    model = small_model("gla")
    model.embed.weight[:257] *= 0.01
    model.embed.weight[256] *= 1e4 # eot or byte 254 follow, or bytes 253 or 255, by a product's sign
    model.embed.weight[254] = model.embed.weight[256]
    model.embed.weight[253] = model.embed.weight[255] = -model.embed.weight[256]
    save_checkpoint(tmp_path, model)
    p = sample(tmp_path, "--max_new_tokens=10000", "--temperature=1", "--top_k=2", "--num_samples=70") # two batches
    assert p.returncode == 0, p.stderr
    texts = p.stdout.split("-" * 80 + "\n")
    assert len(texts) == 70 and len(set(texts)) > 2
    drawn = int(re.search(r"samples: ([\d,]+) tokens", p.stderr)[1].replace(",", ""))
    assert drawn == p.stdout.count("\N{REPLACEMENT CHARACTER}") < 10_000 # what such a byte is shown as

TEXT = "naïve Ω — 日本語 🙂🙃 "

@pytest.fixture(scope="session")
def memorised(tmp_path_factory):
    """A model that has learnt TEXT by heart."""
    folder = tmp_path_factory.mktemp("memorised")
    model = small_model("gdn").requires_grad_(True)
    idx = torch.tensor([[256, *(TEXT * 6).encode()]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    save_checkpoint(folder, model)
    return folder

def test_sample_streams_whole_characters(memorised):
    n = 4 * len(TEXT.encode())
    args = [sys.executable, "sample.py", f"--out_dir={memorised}", f"--prompt={TEXT}", "--temperature=0",
            f"--max_new_tokens={n}"]
    env = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(args, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        reads = list(iter(lambda: os.read(p.stdout.fileno(), 65536), b""))
    assert p.returncode == 0 and len(reads) > 20 # as it comes, not at the end
    assert "".join(part.decode() for part in reads) == 5 * TEXT + "\n" # each read by itself is whole characters

def test_sample_int8(memorised, whole, shards):
    """The same text from fewer bytes, what makes the decay not touched, perplexity on validation text within 0.5%."""
    from sample import load_model, weight_bytes
    flags = f"--prompt={TEXT}", "--temperature=0", f"--max_new_tokens={len(TEXT.encode())}", "--int8=True"
    p = sample(memorised, *flags, env={"PYTHONUTF8": "1"})
    assert p.returncode == 0 and p.stdout == 2 * TEXT + "\n", p.stderr
    checkpoint, path = train.load_checkpoint(str(memorised))
    wide, int8 = (load_model(checkpoint, path, "cpu", on) for on in (False, True))
    assert weight_bytes(int8) < 0.4 * weight_bytes(wide) and f"in {weight_bytes(int8) / 1e6:,.1f} MB" in p.stderr
    kept = wide.state_dict()
    for name, x in int8.state_dict().items():
        exact = x.dtype == torch.float32 and name in kept and torch.equal(x, kept[name])
        assert exact == name.endswith(("norm.weight", "A_log", "dt_bias", "conv.weight", "ab_proj.weight")), name
    checkpoint, path = train.load_checkpoint(str(whole))
    cfg = train.TrainConfig(**{**checkpoint["config"], "data_dir": shards})
    val = train.open_data(cfg)[1]["val"]
    losses = [train.evaluate(cfg, load_model(checkpoint, path, "cpu", on), val, 0, 1, torch.device("cpu"))
              for on in (False, True)]
    assert 0 < abs(math.exp(losses[1] - losses[0]) - 1) < 5e-3, losses

def test_sample_in_a_terminal_without_unicode(memorised):
    p = sample(memorised, f"--prompt={TEXT}", "--temperature=0", "--max_new_tokens=50",
               env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert p.returncode == 0 and p.stdout.startswith("na?ve"), p.stderr

@pytest.mark.parametrize("when", ["drawing", "starting"])
def test_sample_ends_cleanly_at_ctrl_c(memorised, when):
    args = [sys.executable, "sample.py", f"--out_dir={memorised}", "--temperature=0", "--max_new_tokens=1000000"]
    with subprocess.Popen(args, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as p:
        if when == "drawing":
            p.stdout.read(100)
        else:
            time.sleep(0.7) # importing torch
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and b"Traceback" not in err, err
    assert when == "starting" or b"tokens drawn" in err, err

def test_sample_into_head_ends_without_a_word(memorised):
    command = f"{sys.executable} sample.py --out_dir={memorised} --max_new_tokens=100000 | head -c 50"
    p = subprocess.run(command, shell=True,
                       cwd=ROOT, capture_output=True, timeout=120)
    assert p.returncode == 0 and len(p.stdout) == 50, p.stderr
    assert b"Traceback" not in p.stderr and b"Error" not in p.stderr, p.stderr

def test_sample_takes_the_newest_checkpoint(tmp_path):
    out = tmp_path / "out"
    save_checkpoint(out / "a", small_model("gla"), step=9)
    save_checkpoint(out / "b", small_model("gla"), step=5)
    newest = save_checkpoint(out / "b", small_model("gla"), step=10)
    os.utime(out / "a" / "ckpt_9.pt", (1e9, 1e9))
    (out / "b" / "ckpt_11.pt.tmp").write_bytes(b"half")
    p = run(os.path.join(ROOT, "sample.py"), "--max_new_tokens=5", cwd=tmp_path)
    assert p.returncode == 0 and p.stderr.startswith(os.path.relpath(newest, tmp_path) + ":"), p.stderr

def test_sample_falls_back_from_a_damaged_checkpoint(tmp_path):
    good = save_checkpoint(tmp_path, small_model("gla"), step=1)
    flipped = save_checkpoint(tmp_path, small_model("gla"), step=2)
    data = bytearray(open(flipped, "rb").read())
    data[len(data) // 2] ^= 1
    open(flipped, "wb").write(data)
    open(tmp_path / "ckpt_3.pt", "wb").write(data[:1000])
    open(tmp_path / "ckpt_4.pt", "wb").close()
    p = sample(tmp_path, "--max_new_tokens=5")
    assert p.returncode == 0 and p.stderr.count("damaged") == 3 and f"{good}: gla" in p.stderr, p.stderr
    os.remove(good)
    p = sample(tmp_path)
    assert p.returncode == 1 and "Traceback" not in p.stderr, p.stderr
    assert "every checkpoint" in p.stderr.splitlines()[-1], p.stderr

def test_sample_refuses_what_it_cannot_do(outs, tmp_path):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "spaces.txt").write_text(" " * 1_000_000 + "a")
    path = save_checkpoint(tmp_path / "other", small_model("gla", n_layer=1))
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["config"]["n_layer"] = 2
    torch.save(checkpoint, path)
    cases = {("--temperature=0",): ("train one first", "out/"), # in a folder without out/
             (f"--out_dir={tmp_path / 'nowhere'}",): ("nowhere", "train one first"),
             (f"--out_dir={outs / 'gla'}", f"--prompt=@{tmp_path / 'none.txt'}"): ("none.txt", "No such file"),
             (f"--out_dir={outs / 'gla'}", f"--prompt=@{tmp_path / 'latin1.txt'}"): ("latin1.txt", "UTF-8", "byte 3"),
             (f"--out_dir={outs / 'gla'}", "--top_p=1.5"): ("--top_p=1.5",),
             (f"--out_dir={outs / 'gla'}", f"--prompt=@{tmp_path / 'spaces.txt'}"): ("white-space", "900,000"),
             (f"--out_dir={tmp_path / 'other'}",): ("ckpt_1.pt", "does not fit")}
    results = two_at_a_time(lambda *flags: run(os.path.join(ROOT, "sample.py"), *flags, cwd=tmp_path), cases)
    for p, words in zip(results, cases.values()):
        refused(p, *words)

@pytest.mark.parametrize("flag", ["--temperature=-1", "--temperature=nan", "--top_p=0", "--top_p=1.5", "--top_k=-1",
                                  "--num_samples=0", "--max_new_tokens=0", "--seed=-1", "--seed=99999999999999999999"])
def test_sample_refuses_values_out_of_range(flag):
    import sample
    from config import load
    with pytest.raises(SystemExit) as error:
        sample.check(load(sample.SampleConfig, [flag]))
    assert flag.split("=")[0] in str(error.value)

# ----------------------------------------------------------------------------------------------------------------------
# bench.py

BENCH_FLAGS = ["--n_layer=1", "--n_embd=32", "--n_head=2", "--d_key=8", "--d_value=8", "--d_mlp=48", "--seq_len=64",
               "--batch_size=2"]

@pytest.fixture(scope="session")
def bench_rows(tmp_path_factory):
    """stdout of bench.py without --what on small models, and the rows of its JSON by table."""
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    p = run("bench.py", *BENCH_FLAGS, f"--json={path}")
    assert p.returncode == 0, p.stderr
    tables = {}
    for line in open(path):
        row = json.loads(line)
        tables.setdefault(row.pop("table"), []).append(row)
    return p.stdout, tables

KEYS = {"machine": "device torch python triton fla cuda",
        "ceilings": "copy_gb_s matmul_tflops dtype",
        "kernels": "op shape pass dtype ms p10 p90 first_s bytes flops gb_s copy tflops matmul ratio",
        "train": "model mixer B T dtype compile params ms p10 p90 first_s tok_s tflops mfu matmul peak_gb",
        "sample": "model mixer dtype pass batch context ms p10 p90 first_s tok_s weights_mb",
        "memory": "model mixer B T checkpoint_blocks saved_gb state_mb"}

@pytest.mark.parametrize("table", KEYS)
def test_bench_rows(bench_rows, table):
    stdout, tables = bench_rows
    assert set(tables) == set(KEYS)
    for row in tables[table]:
        assert set(KEYS[table].split()) <= set(row), row
        for key, value in row.items():
            if type(value) in (int, float):
                assert 0 < value < float("inf"), (key, row)
        if "ms" in row:
            assert row["p10"] <= row["ms"] <= row["p90"]
        if table not in ("machine", "ceilings"):
            assert row.get("op", row.get("model")) in stdout

def test_bench_figures_agree(bench_rows):
    tables = bench_rows[1]
    kernels = {(row["op"], row["pass"]): row for row in tables["kernels"]}
    assert len(kernels) == 6 and all("error" not in row for row in kernels.values())
    B, T, H, K, V = map(int, kernels["gla_chunked", "fwd"]["shape"].split())
    for (op, part), row in kernels.items():
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
        assert ("saved_gb" in row) == (part == "fwd+bwd")
        reference = "gla_chunked" if "sdpa" in op else op
        assert row["ratio"] == pytest.approx(row["ms"] / kernels[reference, part]["ms"])
    assert kernels["gla_chunked", "fwd"]["bytes"] == 4 * B * T * H * (3 * K + 2 * V) # q k g, v o
    assert kernels["gated_delta_rule_chunked", "fwd+bwd"]["bytes"] == 4 * B * T * H * (3 * (2 * K + V + 2) + 2 * V)
    assert [row["mixer"] for row in tables["train"]] == ["gla", "gdn", "attention"]
    for row in tables["train"]:
        assert row["tok_s"] == pytest.approx(2 * 64 / row["ms"] * 1000)
    for row in tables["sample"]:
        tokens = row["batch"] * (row["context"] if row["pass"] == "prefill" else 1)
        assert row["tok_s"] == pytest.approx(tokens / row["ms"] * 1000)
    weights = {(row["mixer"], row["dtype"]): row["weights_mb"] for row in tables["sample"]}
    assert len(weights) == 6 and all(weights[mixer, "int8"] < 0.4 * weights[mixer, "float32"] for mixer, _ in weights)
    states = {mixer: [row["state_mb"] for row in tables["memory"] if row["mixer"] == mixer]
              for mixer in ("gla", "gdn", "attention")}
    assert states["gla"] == 4 * [4 * 2 * 8 * 8 / 1e6] # fp32 S
    assert states["gdn"] == 4 * [4 * (2 * 8 * 8 + 3 * 48) / 1e6] # and convolutions
    assert states["attention"] == [4 * 2 * 2 * 8 * T / 1e6 for T in (128, 256, 512, 1024)]

@beside
def test_bench_of_one_config_and_one_table(tmp_path):
    tiny = os.path.join(ROOT, "config", "tiny.py")
    p = run(os.path.join(ROOT, "bench.py"), tiny, *BENCH_FLAGS, "--what=memory", cwd=tmp_path)
    assert p.returncode == 0, p.stderr
    assert re.findall("^(operators|training step|generation|memory)", p.stdout, re.M) == ["memory"]
    assert len(re.findall(r"^tiny +\d+ ", p.stdout, re.M)) == 4 # lengths

def test_bench_names_what_it_measures():
    import bench
    for flag, names in (("--n_layer=1", ["gla", "gdn", "attention"]), ("--mixer=gdn", ["gdn"])):
        cfgs = bench.models([flag])
        assert list(cfgs) == [f"tiny {name}" for name in names] and [cfg.mixer for cfg in cfgs.values()] == names

def test_bench_counts_what_is_saved():
    import bench
    x = torch.ones(1000, requires_grad=True)
    assert bench.saved_bytes(lambda: x.exp(), [x]) == 4000 # its result, which is what its backward needs
    assert bench.saved_bytes(lambda: x * x, [x]) == 4000 # the result alone
    assert bench.saved_bytes(lambda: (x.exp() * 2).exp(), [x]) == 8000

def test_bench_knows_kinds_of_kernels():
    from bench import kind_of
    for kernel, kind in (("gla_sweep_kernel", "mixer kernels"), ("gdn_states_kernel", "mixer kernels"),
                         ("conv_bwd_kernel", "mixer kernels"), ("causal_conv1d_fwd_kernel", "mixer kernels"),
                         ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "mixer kernels"),
                         ("merge_16x16_to_64x64_inverse_kernel", "mixer kernels"),
                         ("layer_norm_gated_bwd_kernel", "norms, elementwise"),
                         ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "mixer kernels"),
                         ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
                         ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
                         ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
                         ("triton_red_fused__log_softmax_nll_loss_forward_3", "loss"),
                         ("triton_poi_fused_mul_silu_7", "norms, elementwise")):
        assert kind_of(kernel) == kind, kernel

def test_bench_draws_the_curves_of_runs(tmp_path):
    for run_name in ("a", "b"):
        os.makedirs(tmp_path / "out" / run_name)
        with open(tmp_path / "out" / run_name / "log.jsonl", "w") as f:
            print(json.dumps({"config": {}, "commit": "", "versions": {}}), file=f)
            for step in range(1, 50):
                loss = None if step == 7 else 5 / step # a step whose loss was not finite
                val = {"val_loss": 1.0} if step % 10 == 0 else {}
                print(json.dumps({"step": step, "tokens": step * 1000, "loss": loss, **val}), file=f)
            if run_name == "a": # what --eval_only=True adds
                print(json.dumps({"step": 49, "tokens": 49_000, "val_loss": 1.0,
                                  "val_loss_by_position": [[128, 2.0, 500], [256, None, 90]]}), file=f)
    picture = tmp_path / "loss.png"
    p = run("bench.py", f"--plot={picture}", f"--logs={tmp_path}/out/*/log.jsonl")
    if not importlib.util.find_spec("matplotlib"): # needed for this alone, so not in requirements.txt
        return refused(p, "--plot", "pip install matplotlib")
    assert p.returncode == 0 and "2 runs" in p.stdout, p.stderr
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    refused(run("bench.py", f"--plot={picture}", f"--logs={tmp_path}/out/*"), "out/a: not a log.jsonl")

@beside
def test_bench_refuses_what_it_cannot_do(tmp_path):
    cases = {("--what=speed",): ("speed", "kernels, train, sample, memory"),
             ("--seq_len=0",): ("--seq_len=0", "at least 1"),
             (f"--json={tmp_path}/none/rows.jsonl",): ("none/rows.jsonl", "No such file"),
             (f"--plot={tmp_path}/loss.png", f"--logs={tmp_path}/*.jsonl"): (str(tmp_path), "no such file")}
    for p, words in zip(two_at_a_time(lambda *flags: run("bench.py", *flags), cases), cases.values()):
        refused(p, *words)
