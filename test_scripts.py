"""
The scripts as their users run them: subprocesses, real files, kills, two ranks on gloo, exit codes and messages.

    pytest test_scripts.py                                      # CPU
    TIKTOKEN_CACHE_DIR=DIR pytest test_scripts.py               # also what needs the GPT-2 vocabulary offline
"""
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard

from prepare import load_tokenizer

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

@pytest.fixture(scope="module")
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
    refused(run(script, "--verify=True", f"--out_dir={tmp_path}"), "meta.json")

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
    shards = [{name: shard for name, shard in prepared(tmp_path / source, tmp_path / f"{source}.out")["shards"].items()}
              for source in "abcd"]
    assert shards[0] == shards[1] == shards[2] == shards[3]
    out = tmp_path / "a.out"
    assert sorted(documents_of(out, "train") + documents_of(out, "val")) == sorted(documents)
    assert len(documents_of(out, "val")) == 1 # at least one, though none of these is 1 in 200
    meta = prepared(tmp_path / "*" / "[ab].jsonl*", tmp_path / "glob")
    assert meta["train_documents"] + meta["val_documents"] == 120 and meta["val_documents"] == 2 # both copies of one text
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
    meta = prepared(tmp_path / "a", tmp_path / "out")
    train, val = documents_of(tmp_path / "out", "train"), documents_of(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(documents + documents[:1000])
    assert not set(train) & set(val)
    assert 8 <= len(set(val)) <= 36 # 20 expected, standard deviation 4.5
    jsonl(tmp_path / "a" / "1.jsonl", texts(300, 1)) # more data moves no document
    prepared(tmp_path / "a", tmp_path / "out2")
    assert set(val) <= set(documents_of(tmp_path / "out2", "val"))
    assert not set(train) & set(documents_of(tmp_path / "out2", "val"))
    assert meta["settings"]["source"] != json.loads((tmp_path / "out2" / "meta.json").read_text())["settings"]["source"]
    refused(prepare(tmp_path / "a", tmp_path / "out"), "source") # not the files it was made of

TRICKY = {
    "spaces": " " * 10**6, "spaces before text": " " * 10**6 + "end", "spaces inside": "a" + " " * 2_500_000 + "\nb",
    "lines before text": "\n" * 10**6 + "end", "wide spaces": "\u3000\t" * 600_000 + "end", "one letter": "a" * 10**6,
    "one symbol": "^" * 10**6, "lone surrogate": "a\ud800b\udfffc", "pair of surrogates": "\U0001f600", "empty": "",
    "special": "<|endoftext|> and <|endoftext|>", "minified": "function(a,b){return a[b]||{}};" * 70_000,
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
    code = ("import resource, subprocess, sys; subprocess.run([sys.executable, 'prepare.py', *sys.argv[1:]], check=True); "
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

BAD = { # name of the file: what it holds, and words of the sentence
    "cut.jsonl.zst": (lambda: zstandard.ZstdCompressor().compress(b'{"text": "a"}\n' * 9)[:-5], ["cut.jsonl.zst", "truncated"]),
    "second.jsonl.zst": (lambda: (2 * zstandard.ZstdCompressor().compress(b'{"text": "a"}\n' * 9))[:-5], ["second.jsonl.zst",
                                                                                                     "truncated"]),
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
    "column.parquet": (lambda: parquet({"content": ["a", "b"]}), ["column.parquet", "'text'", "content"]),
    "null.parquet": (lambda: parquet({"text": ["a", None]}), ["null.parquet, row 1", "'text'"]),
    "number.parquet": (lambda: parquet({"text": [1, 2]}), ["number.parquet, row 0", "'text'"]),
    "one.txt": (lambda: b"one document", ["one.txt", "two different documents"]),
    "same.jsonl": (lambda: b'{"text": "a"}\n' * 5, ["same.jsonl", "two different documents"]),
    "none.jsonl": (lambda: b"\n", ["none.jsonl", "two different documents"]),
    "table.csv": (lambda: b"text\na\n", ["table.csv", ".parquet"])}

def parquet(columns):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()

@pytest.mark.parametrize("name, layout", [(name, layout) for name in BAD for layout in ("", "train") # drawn, or beside it
                                          if not layout or name.split(".")[0] not in ("one", "same", "none", "table")])
def test_prepare_names_a_bad_file(tmp_path, name, layout):
    content, words = BAD[name]
    folder = tmp_path / "corpus" / layout
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content())
    if layout:
        jsonl(tmp_path / "corpus" / "validation" / "a.jsonl", ["x"])
    refused(prepare(tmp_path / "corpus" if layout else folder / name, tmp_path / "out"), *words)
    assert not (tmp_path / "out" / "meta.json").exists()

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
    (["--merge=no/such"], ["no/such", "meta.json"])])
def test_prepare_refuses(tmp_path, flags, words):
    refused(run("prepare.py", f"--out_dir={tmp_path}", "--num_proc=1", *flags, env={"HF_HUB_OFFLINE": "1"}), *words)

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
        assert documents_of(merged, split) == [text for part in parts for text in documents_of(pathlib.Path(part), split)]
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
        k, when = [(2, "after"), (3, "before"), (3, "after"), (4, "before")][runs % 4]
        p = run(wrapper, k, when, f"--dataset={files}", f"--out_dir={out}", "--num_proc=1", *flags, env={"PYTHONPATH": ROOT})
        assert p.returncode in (0, -9) and "Traceback" not in p.stderr, p.stderr
        runs += 1
        assert runs < 60
    assert runs > 5
    prepared(files, out, *flags)
    assert files_of(out) == files_of(tmp_path / "whole")

def start(*args):
    return subprocess.Popen([sys.executable, "prepare.py", *map(str, args)], cwd=ROOT, start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

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
    refused(run("prepare.py", f"--out_dir={out}", *flags[:2], "--shard_tokens=60000"), "shard_tokens", "50000", "60000")
    p = run("prepare.py", *flags, f"--out_dir={out}")
    assert p.returncode == 0 and "going on after" in p.stdout
    assert files_of(out) == files_of(whole)

def test_prepare_interrupted_and_a_worker_killed(tmp_path):
    jsonl(tmp_path / "a.jsonl", texts(3000) * 4)
    flags = f"--dataset={tmp_path / 'a.jsonl'}", "--num_proc=2", "--shard_tokens=50000", f"--out_dir={tmp_path / 'out'}"
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
        refused(subprocess.CompletedProcess([], p.returncode, stdout, stderr), "worker" if worker_killed else "interrupted")
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))

def test_prepare_on_a_full_disk(tmp_path):
    jsonl(tmp_path / "a.jsonl", texts(400))
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); import prepare; prepare.main()"
    p = run("-c", limited, f"--dataset={tmp_path / 'a.jsonl'}", f"--out_dir={tmp_path / 'out'}", "--num_proc=1")
    refused(p, "File too large", "out")

# the hub, on files: fails like a 429 or a broken connection before certain documents, and on one opening
HUB = """
import json, os, sys, time
import datasets
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

splits = json.loads(os.environ["SPLITS"])
failures, calls = json.loads(os.environ["FAILURES"]), []
failures = [tuple(failure) for failure in failures]
sleep = prepare.time.sleep
prepare.time.sleep = lambda seconds: print("slept", seconds)
datasets.load_dataset = load_dataset
if __name__ == "__main__":
    prepare.main()
"""

@pytest.mark.parametrize("validation", [True, False])
def test_prepare_streams_from_the_hub(tmp_path, validation):
    train = [texts(60, i) for i in range(4)]
    splits = {"train": [str(jsonl(tmp_path / f"{i}.jsonl", documents)) for i, documents in enumerate(train)]}
    if validation:
        splits["validation"] = [str(jsonl(tmp_path / "v.jsonl", texts(10, 9)))]
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(HUB)
    def hub(out, failures, *flags):
        env = {"PYTHONPATH": ROOT, "SPLITS": json.dumps(splits), "FAILURES": json.dumps(failures), "HF_HUB_OFFLINE": "1"}
        return run(wrapper, "--dataset=someone/corpus", "--name=en", "--revision=abc", "--num_proc=1", "--shard_tokens=20000",
                   f"--out_dir={out}", *flags, env=env)
    p = hub(tmp_path / "calm", [])
    assert p.returncode == 0 and p.stdout.count("slept") == 1 and not p.stderr, (p.stdout, p.stderr)
    got = documents_of(tmp_path / "calm", "train"), documents_of(tmp_path / "calm", "val")
    if validation:
        assert got == (sum(train, []), texts(10, 9))
    else:
        assert sorted(got[0] + got[1]) == sorted(sum(train, [])) and not set(got[0]) & set(got[1]) and got[1]
    p = hub(tmp_path / "busy", [("0.jsonl", 7), ("0.jsonl", 8), ("2.jsonl", 0), ("2.jsonl", 0), ("2.jsonl", 0), ("3.jsonl", 59)])
    assert p.returncode == 0 and "429 Too Many Requests" in p.stdout and "slept 4" in p.stdout, (p.stdout, p.stderr)
    assert files_of(tmp_path / "busy") == files_of(tmp_path / "calm")
    # down for good after two files: gives up, and goes on from there the next time without reading them again
    down = tmp_path / "down"
    refused(hub(down, [("2.jsonl", 5)] * 50), "someone/corpus", "10 attempts", "again later")
    assert len(list(down.glob("train_*.bin"))) > 0
    p = hub(down, [("0.jsonl", 3)])
    assert p.returncode == 0 and "going on after" in p.stdout, (p.stdout, p.stderr)
    assert files_of(down) == files_of(tmp_path / "calm")
    for i in range(2):
        assert hub(tmp_path / f"part{i}", [], f"--shard={i}/2").returncode == 0
    assert documents_of(tmp_path / "part1", "train")[:5] == [text for text in train[1] if text in got[0]][:5]
    refused(hub(tmp_path / "x", [], "--split=test"), "test", "train")
    refused(hub(tmp_path / "y", [], "--text_field=content"), "content", "--text_field")
    refused(hub(tmp_path / "z", [], "--shard=4/5"), "--shard=4/5", "4 files")

@needs_gpt2
@pytest.mark.skipif(not os.path.isdir(os.path.join(SHARED, "corpus")), reason="no corpus beside the repository")
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

# ----------------------------------------------------------------------------------------------------------------------
# sample.py

SMALL = dict(n_layer=2, n_embd=32, n_head=2, d_key=8, d_value=8, d_mlp=48, vocab_size=320) # bytes use 257 of the 320 ids
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
    torch.save({"model": model.state_dict(), "config": dataclasses.asdict(model.cfg), "tokenizer": tokenizer, "step": step,
                "vocab_size": 257 if tokenizer == "bytes" else 50_257}, path)
    return path

@pytest.fixture(scope="module")
def outs(tmp_path_factory):
    """Folders that each hold a small model's checkpoint, by mixer."""
    root = tmp_path_factory.mktemp("out")
    for mixer in SMALL_MODELS:
        save_checkpoint(root / mixer, small_model(mixer))
    return root

def sample(out_dir, *flags, **kwargs):
    return run("sample.py", f"--out_dir={out_dir}", *flags, **kwargs)

def greedy_by_full_forwards(model, tokens, n):
    for _ in range(n):
        tokens = tokens + [model(torch.tensor([tokens]))[0][0, -1, :257].argmax().item()]
    return tokens[-n:]

@pytest.mark.parametrize("mixer", SMALL_MODELS)
@torch.no_grad()
def test_greedy_decoding_equals_full_forwards(mixer):
    import sample
    model = small_model(mixer)
    for length in (1, 2, 3, 5, 64, 100):
        tokens = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        n = 256 if length == 5 else 32
        decoder = sample.Decoder(model, 1, 257, temperature=0, top_k=0, top_p=1)
        state, logits = sample.prefill(model, torch.tensor([tokens]))
        got = list(sample.generate(decoder, state, logits, n, eot=-1))
        expected = greedy_by_full_forwards(model, tokens, n)
        assert got == expected and len(set(got)) >= 5, length

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
                if mixer == "gla" and piece % 64 == 0: # the same chunks, the same sums
                    assert torch.equal(a[name], b[name]), (name, piece)

@torch.no_grad()
def test_samples_do_not_disturb_each_other_and_memory_is_constant():
    import sample
    model = small_model("gdn")
    state, logits = sample.prefill(model, torch.tensor([[256, 65]]))
    size = sample.state_bytes(state)
    decoder = sample.Decoder(model, 1, 257, temperature=0, top_k=0, top_p=1)
    first = list(sample.generate(decoder, state, logits, 100, eot=-1))
    assert list(sample.generate(decoder, state, logits, 100, eot=-1)) == first
    assert sample.state_bytes(decoder.state) == size == 4 * 2 * (2 * 8 * 8 + 3 * 48) # fp32, 2 layers, S and convolutions

@torch.no_grad()
def test_a_batch_gives_each_row_its_own_tokens():
    import sample
    model = small_model("gla")
    prompts = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))
    def greedy(tokens):
        decoder = sample.Decoder(model, len(tokens), 257, temperature=0, top_k=0, top_p=1)
        decoder.start(*sample.prefill(model, tokens))
        out = [decoder.token.clone()]
        for _ in range(40):
            decoder.step()
            out.append(decoder.token.clone())
        return torch.cat(out, 1)
    assert torch.equal(greedy(prompts), torch.cat([greedy(p[None]) for p in prompts]))

def test_choose():
    from sample import choose
    torch.manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05]).repeat(20_000, 1)
    def shares(temperature=1.0, top_k=0, top_p=1.0):
        return torch.bincount(choose(p.log(), temperature, top_k, top_p)[:, 0], minlength=4) / len(p)
    def near(expected, **how):
        torch.testing.assert_close(shares(**how), torch.tensor(expected).float(), rtol=0, atol=0.015) # 4 standard deviations
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
        decoder = Decoder(model, 1, 257, temperature, top_k=320, top_p=1)
        assert max(generate(decoder, state, logits, 300, eot=-1)) < 257
    save_checkpoint(tmp_path, model)
    assert sample(tmp_path, "--temperature=5", "--top_k=0").returncode == 0

def test_sample_seeds_and_prompts(outs):
    first, again, other = (sample(outs / "gdn", "--prompt=ab", "--max_new_tokens=60", f"--seed={s}") for s in (1, 1, 2))
    assert first.returncode == 0 and first.stdout.startswith("ab"), first.stderr
    assert first.stdout == again.stdout != other.stdout
    assert "prompt: 3 tokens" in first.stderr and "tok/s" in first.stderr and str(outs / "gdn") in first.stderr
    two = sample(outs / "gdn", "--prompt=ab", "--max_new_tokens=60", "--seed=1", "--num_samples=2").stdout
    one, rule, rest = two.partition("-" * 80)
    assert one == first.stdout and rest.strip().startswith("ab") and rest.strip() != one.strip()

def test_sample_empty_prompt_and_top_k_beyond_the_vocabulary(outs):
    p = sample(outs / "gla", "--max_new_tokens=20", "--top_k=1000000", "--top_p=0.9")
    assert p.returncode == 0 and "prompt: 1 tokens" in p.stderr and p.stdout.strip(), p.stderr

@pytest.mark.parametrize("mixer", SMALL_MODELS)
def test_sample_reads_long_prompts_from_a_file(outs, mixer, tmp_path):
    rng = random.Random(0)
    text = "".join(rng.choice("abcdefgh \r\n") for _ in range(20_000 - 1))
    (tmp_path / "story.txt").write_text(text, newline="")
    p = sample(outs / mixer, f"--prompt=@{tmp_path / 'story.txt'}", "--temperature=0", "--max_new_tokens=4")
    assert p.returncode == 0 and "prompt: 20,000 tokens" in p.stderr, p.stderr
    if mixer == "attention": # quadratic: seconds
        return
    from sample import Decoder, generate, prefill
    model = small_model(mixer)
    state, logits = prefill(model, torch.tensor([[256, *text.encode()]]), piece=20_000)
    tokens = generate(Decoder(model, 1, 257, 0, 0, 1), state, logits, 4, eot=256)
    assert p.stdout == bytes(tokens).decode(errors="replace") + "\n"

def test_sample_ends_at_eot(tmp_path):
    model = small_model("gla")
    model.embed.weight[:257] *= 0.01
    model.embed.weight[256] *= 1e4 # whatever the model reads, it is eot or byte 255 that follows, by the sign of the product
    model.embed.weight[255] = -model.embed.weight[256]
    save_checkpoint(tmp_path, model)
    p = sample(tmp_path, "--max_new_tokens=100000", "--temperature=1", "--top_k=2")
    assert p.returncode == 0, p.stderr
    assert int(re.search(r"samples: ([\d,]+) tokens", p.stderr)[1].replace(",", "")) < 1000

TEXT = "naïve Ω — 日本語 🙂🙃 "

@pytest.fixture(scope="module")
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
    args = [sys.executable, "sample.py", f"--out_dir={memorised}", f"--prompt={TEXT}", "--temperature=0", f"--max_new_tokens={n}"]
    env = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(args, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        reads = list(iter(lambda: os.read(p.stdout.fileno(), 65536), b""))
    assert p.returncode == 0 and len(reads) > 20 # as it comes, not at the end
    assert "".join(part.decode() for part in reads) == 5 * TEXT + "\n" # each read by itself is whole characters

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
    p = subprocess.run(f"{sys.executable} sample.py --out_dir={memorised} --max_new_tokens=100000 | head -c 50", shell=True,
                       cwd=ROOT, capture_output=True, timeout=120)
    assert p.returncode == 0 and len(p.stdout) == 50 and b"Traceback" not in p.stderr and b"Error" not in p.stderr, p.stderr

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
    assert p.returncode == 1 and "Traceback" not in p.stderr and "every checkpoint" in p.stderr.splitlines()[-1], p.stderr

def test_sample_refuses_what_it_cannot_do(outs, tmp_path):
    refused(run(os.path.join(ROOT, "sample.py"), cwd=tmp_path), "train one first", "out/")
    refused(sample(tmp_path / "nowhere"), "nowhere", "train one first")
    refused(sample(outs / "gla", f"--prompt=@{tmp_path / 'none.txt'}"), "none.txt", "No such file")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    refused(sample(outs / "gla", f"--prompt=@{tmp_path / 'latin1.txt'}"), "latin1.txt", "UTF-8", "byte 3")
    model = small_model("gla", n_layer=1)
    save_checkpoint(tmp_path / "other", model)
    checkpoint = torch.load(tmp_path / "other" / "ckpt_1.pt", weights_only=True)
    checkpoint["config"]["n_layer"] = 2
    torch.save(checkpoint, tmp_path / "other" / "ckpt_1.pt")
    refused(sample(tmp_path / "other"), "ckpt_1.pt", "does not fit")

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
