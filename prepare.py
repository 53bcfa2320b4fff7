"""
Text to uint16 shards, the form train.py reads.

    python prepare.py                                        # Python's own library, as bytes: no network
    python prepare.py --dataset=slimpajama --tokenizer=gpt2  # 15B tokens, streamed from the hub: 30 GB
    python prepare.py --dataset=DIR --tokenizer=gpt2         # .jsonl, .jsonl.zst, .parquet, .txt; or a glob
    python prepare.py --dataset=DIR --tokenizer=gpt2 --verify=True       # hash the finished shards again
    python prepare.py --dataset=DIR --tokenizer=gpt2 --shard=0/2         # the first of two machines, then
    python prepare.py --merge=data/DIR-gpt2-0of2,data/DIR-gpt2-1of2      # what both made, as one folder

The folder data/DIR-gpt2 gets train_00000.bin, ..., val_00000.bin, ... (raw little-endian uint16; every
document starts with eot and may continue in the next shard) and, last of all, meta.json. A run that was
killed goes on where progress.json says when the same command is given again, and ends with the same bytes.
Speed is tiktoken's, 3 to 10 MB/s of text a core; memory is bounded, by a few MB of text a worker and the
longest record.
"""
import fcntl
import glob
import hashlib
import importlib
import json
import multiprocessing
import os
import platform
import queue
import re
import signal
import sys
import sysconfig
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL) # Ctrl-C while the rest is imported

import numpy as np
import tiktoken

import config

SLIMPAJAMA = "cerebras/SlimPajama-627B", "2d0accdd58c5d5511943ca1f5ff0e3eb5e293543" # hub id, revision
SUFFIXES = ".jsonl", ".jsonl.zst", ".parquet", ".txt"
VAL_ONE_IN = 200 # documents, where the source has no validation split
BATCH = 1 << 20 # characters of text a worker gets at a time
WHITE_RUN = 900_000 # characters of white space; tiktoken's regex gives up at 999,999 of them before text
ATTEMPTS = 10 # at the hub in a row, 1, 2, 4, ..., 64, 64, 64 s apart

@dataclass(frozen=True)
class PrepareConfig:
    # source
    dataset: str = "stdlib" # stdlib, slimpajama, a hub id, or local files: a folder, a file, a glob
    name: str = "" # hub only: the data set's configuration
    split: str = "train" # hub only
    revision: str = "" # hub only: a commit; slimpajama has its own
    text_field: str = "text" # of a record
    # tokens
    tokenizer: str = "bytes" # bytes or gpt2
    total_tokens: int = 15_000_000_000 # of training, at most
    val_tokens: int = 10_000_000 # of validation, at most
    shard_tokens: int = 100_000_000 # a file of 2 bytes each
    # work
    out_dir: str = "" # "": data/<last part of the data set's name>-<tokenizer>
    num_proc: int = 0 # worker processes; 0: one a core
    shard: str = "0/1" # i/n: every n-th source file from the i-th on, and an n-th of the tokens
    merge: str = "" # the folders of all n shards, comma-separated
    verify: bool = False # hash the shards of a finished folder again

def load_tokenizer(name):
    """The tiktoken.Encoding called `name`: gpt2 (50,257 ids), or bytes (ids 0-255 and eot 256)."""
    if name == "bytes": # the pieces of 64 characters have no effect on the ids, only on the speed
        enc = tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 256},
                                mergeable_ranks={bytes([i]): i for i in range(256)})
    elif name == "gpt2":
        try:
            enc = tiktoken.get_encoding("gpt2")
        except OSError as error: # requests' errors are OSErrors
            sys.exit(f"--tokenizer=gpt2: its vocabulary can't be downloaded ({brief(error)}), set "
                     "TIKTOKEN_CACHE_DIR to a folder that holds it")
    else:
        sys.exit(f"--tokenizer={name}: it must be bytes or gpt2")
    if enc.max_token_value >= 2**16:
        sys.exit(f"--tokenizer={name}: its largest id, {enc.max_token_value}, does not fit uint16")
    return enc

# ----------------------------------------------------------------------------------------------------------------------
# sources: each yields its documents in a fixed order, from any place on

class Document(NamedTuple):
    place: object # JSON; `documents` takes it to start with this document again
    where: str # file and line, for messages
    text: object # str; bytes: a line of JSON, which the worker parses; None: there is none
    key: bytes # val_key of the whole document; b"": the worker takes it
    opens: bool # False: this goes on with the document before

class Local:
    """Files on this machine. `splits` holds paths under "val" and "train", or under "" where
    validation is to be drawn."""
    def __init__(self, cfg):
        self.text_field, self.read = cfg.text_field, {} # path: bytes read so far, as they lie on disk
        self.revision = platform.python_version() if cfg.dataset == "stdlib" else ""
        root, self.every = stdlib_files() if cfg.dataset == "stdlib" else local_files(cfg.dataset)
        listing = [(os.path.relpath(path, root), os.path.getsize(path))
                   for paths in self.every.values() for path in paths]
        self.fingerprint = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
        index, count = part_of(cfg.shard)
        self.splits = {split: paths[index::count] for split, paths in self.every.items()}
        train = list(self.every.values())[-1]
        if count > len(train):
            sys.exit(f"--shard={cfg.shard}: {cfg.dataset} has only {len(train)} training files")
        self.total = sum(os.path.getsize(path) for paths in self.splits.values() for path in paths)

    def fraction(self):
        return sum(self.read.values()) / max(self.total, 1) # all files may be empty

    def documents(self, split, place=None, everywhere=False):
        """The documents of a split from `place` on, of this shard's files or of the files `everywhere`."""
        place = place or [0, 0] # file, record
        for i, path in enumerate((self.every if everywhere else self.splits)[split]):
            if i < place[0]:
                self.read[path] = os.path.getsize(path)
                continue
            for record, document in enumerate(self.records(path)):
                if [i, record] >= place:
                    yield Document([i, record], *document)

    def records(self, path):
        """(where, text, key, opens) of each record of a file."""
        if path.endswith((".jsonl", ".jsonl.zst")):
            lines = enumerate(self.lines(path), 1)
            return ((f"{path}:{n}", line, b"", True) for n, line in lines if line.strip())
        if path.endswith(".parquet"):
            return ((f"{path}, row {n}", text, b"", True) for n, text in enumerate(self.rows(path)))
        key = val_key(file_sha256(path)) # the file is one document, read in pieces: it may exceed memory
        return ((path, text, key, n == 0) for n, text in enumerate(self.pieces(path)))

    def chunks(self, path):
        """The bytes of a file, decompressed. A .zst is a row of frames and has to end where one does."""
        zstd, frame = need("zstandard") if path.endswith(".zst") else None, None
        size = 1 << 10 if zstd else 1 << 20 # zstd may make 32,000 times as much of it
        with open(path, "rb") as f:
            while block := (frame and frame.unused_data) or f.read(size):
                self.read[path] = f.tell()
                if zstd:
                    if frame is None or frame.eof:
                        frame = zstd.ZstdDecompressor().decompressobj()
                    try:
                        block = frame.decompress(block)
                    except zstd.ZstdError as error:
                        sys.exit(f"{path}: damaged or not a zstd file ({error}), fetch it again")
                yield block
        if zstd and not (frame and frame.eof):
            sys.exit(f"{path}: truncated, it ends inside a zstd frame, fetch it again")

    def lines(self, path):
        parts = [] # of the line that is not over yet
        for data in self.chunks(path):
            *whole, rest = data.split(b"\n")
            if whole:
                yield b"".join([*parts, whole[0]])
                yield from whole[1:]
                parts = []
            parts.append(rest)
        yield b"".join(parts)

    def rows(self, path):
        try:
            f, size = need("pyarrow.parquet").ParquetFile(path), os.path.getsize(path)
            columns = f.schema_arrow.names
            if self.text_field not in columns:
                sys.exit(f"{path}: no column {self.text_field!r}, set --text_field to one of {columns}")
            for batch in f.iter_batches(batch_size=64, columns=[self.text_field]):
                self.read[path] = self.read.get(path, 0) + size * len(batch) / f.metadata.num_rows
                yield from (text if isinstance(text, str) else None for text in batch.column(0).to_pylist())
        except (need("pyarrow").ArrowException, OSError, ValueError) as error:
            sys.exit(f"{path}: damaged or not a parquet file ({brief(error)})")

    def pieces(self, path):
        """A file's text in pieces that encode as the whole does: each ends before white space that follows
        text, which no match of tiktoken's regex crosses. A million characters without one are cut."""
        text = ""
        with open(path, encoding="utf-8", newline="") as f:
            try:
                while block := f.read(BATCH):
                    self.read[path] = f.buffer.tell()
                    text += block
                    parts = text.rsplit(None, 1) # around the last white space between text
                    cut = len(parts[0]) if len(parts) == 2 else len(text)
                    yield text[:cut]
                    text = text[cut:]
            except UnicodeDecodeError as error:
                sys.exit(f"{path}: not UTF-8 ({error.reason} after byte {self.read.get(path, 0):,})")
        yield text

def local_files(dataset):
    """The root and the splits of a folder (SlimPajama's layout is known), a file or a glob."""
    dataset = os.path.expanduser(dataset)
    root = dataset if os.path.isdir(dataset) else os.path.dirname(dataset)
    val, train = (os.path.join(dataset, split) for split in ("validation", "train"))
    if os.path.isdir(train):
        patterns = {"val": val, "train": train} if os.path.isdir(val) else {"": train}
    else:
        patterns = {"": dataset}
    splits = {}
    for split, path in patterns.items():
        pattern = os.path.join(glob.escape(path), "**") if os.path.isdir(path) else path
        found = [path] if os.path.isfile(path) else glob.glob(pattern, recursive=True)
        for name in found:
            if not os.access(name, os.R_OK) and (os.path.isdir(name) or name.endswith(SUFFIXES)):
                sys.exit(f"{name}: cannot be read, or points nowhere")
            if name.endswith(SUFFIXES) and not os.path.isfile(name) and not os.path.isdir(name):
                sys.exit(f"{name}: a pipe or a device, not a file: its text has to be read twice")
        splits[split] = sorted(name for name in found if name.endswith(SUFFIXES) and os.path.isfile(name))
        if not splits[split]:
            sys.exit(f"{path}: no {', '.join(SUFFIXES)} files there")
    return root, splits

def stdlib_files():
    """The root and the sources of the standard library: no tests, UTF-8 only, exact duplicates dropped."""
    root, paths = sysconfig.get_paths()["stdlib"], {}
    for path in sorted(glob.glob(os.path.join(glob.escape(root), "**", "*.py"), recursive=True)):
        folders = os.path.relpath(path, root).split(os.sep)[:-1]
        if not any(re.fullmatch("(site|dist)-packages|(.*_)?tests?", folder) for folder in folders):
            with open(path, "rb") as f:
                source = f.read()
            try:
                source.decode()
            except UnicodeDecodeError:
                continue
            paths.setdefault(source, path)
    return root, {"": list(paths.values())}

class Hub:
    """A data set of the Hugging Face hub, streamed. The hub answers 429 or 503 at times, connections break:
    both are waited for. A place is the stream's own state: going on does not fetch whole files again."""
    def __init__(self, cfg):
        self.id, self.revision = SLIMPAJAMA if cfg.dataset == "slimpajama" else (cfg.dataset, cfg.revision)
        self.cfg, self.fingerprint, self.reached = cfg, self.id, False
        self.datasets = need("datasets")
        for library in (self.datasets.utils, need("huggingface_hub")):
            library.logging.set_verbosity_error() # of the attempts, `wait` tells

    @property
    def splits(self):
        return ["val", "train"] if "validation" in self.open() and self.cfg.split != "validation" else [""]

    def fraction(self):
        return 0.0 # of an unknown whole

    def open(self):
        for failures in range(1, ATTEMPTS + 1):
            try:
                streams = self.datasets.load_dataset(self.id, self.cfg.name or None, streaming=True,
                                                     revision=self.revision or None)
                self.reached = True
                return streams
            except Exception as error: # one of half a dozen libraries'
                self.wait(error, failures)

    def stream(self, split, everywhere):
        """The stream of a split, of this shard's files or of those `everywhere`; None if it gets none."""
        name, (index, count) = "validation" if split == "val" else self.cfg.split, part_of(self.cfg.shard)
        streams = self.open()
        if name not in streams:
            sys.exit(f"{self.id}: no split {name!r}, set --split to one of {sorted(streams)}")
        files = streams[name].num_shards
        if count == 1 or everywhere:
            return streams[name]
        if count > files and split != "val":
            sys.exit(f"--shard={self.cfg.shard}: {self.id} has only {files} files in {name!r}")
        return streams[name].shard(min(count, files), index, contiguous=False) if index < files else None

    def documents(self, split, place=None, everywhere=False):
        failures = 0
        while True:
            try:
                stream = self.stream(split, everywhere)
                if stream is None: # fewer validation files than shards
                    return
                if place:
                    stream.load_state_dict(place)
                place = place or stream.state_dict()
                for row in stream:
                    text = row.get(self.cfg.text_field)
                    text = text if isinstance(text, str) else None
                    yield Document(place, f"{self.id}, {split or self.cfg.split}", text, b"", True)
                    place, failures = stream.state_dict(), 0
                return
            except Exception as error:
                failures += 1
                self.wait(error, failures)

    def wait(self, error, failures):
        """Sleeps before the next attempt; exits where there is no use in one."""
        status, cause = 0, error
        while cause and not status:
            status = getattr(getattr(cause, "response", None), "status_code", 0)
            cause = cause.__cause__ or cause.__context__
        if not self.reached and status != 429 and status < 500:
            sys.exit(f"{self.cfg.dataset}: no such local file or folder, and the hub has no such data set or "
                     f"cannot be reached ({brief(error)})")
        if failures == ATTEMPTS:
            sys.exit(f"{self.id}: {ATTEMPTS} attempts failed ({brief(error)}), give the command again later")
        seconds = min(2 ** (failures - 1), 64)
        print(f"{self.id}: {brief(error)}; attempt {failures + 1} of {ATTEMPTS} in {seconds} s", flush=True)
        time.sleep(seconds)

# ----------------------------------------------------------------------------------------------------------------------
# workers: text to tokens

def text_of(document, field):
    """The text of a document, with U+FFFD for lone surrogates."""
    where, text = document.where, document.text
    if isinstance(text, bytes):
        try:
            record = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            sys.exit(f"{where}: not a JSON record ({brief(error)})")
        text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        sys.exit(f"{where}: no text under {field!r}, name the right field with --text_field")
    try:
        text.encode()
    except UnicodeEncodeError: # as encode_ordinary does
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

def val_key(sha256):
    """Documents whose text has the smallest keys are validation. Any bytes of the hash would do; with these
    the standard library of each Python from 3.10 to 3.13 gives four files or more, 50 kB or more."""
    return sha256.digest()[2:]

def encode(enc, document, field, bound):
    """Whether a document is drawn for validation, its bytes of UTF-8, its tokens. A special token that is
    spelled out is ordinary text; white space is cut where a run of it is too long for tiktoken."""
    text, cuts = text_of(document, field), []
    if len(text) > WHITE_RUN:
        runs = (run.span() for run in re.finditer(r"\s+", text))
        cuts = [cut for start, end in runs for cut in range(start + WHITE_RUN, end, WHITE_RUN)]
    ids = [np.array([enc.eot_token] * document.opens, np.uint32)]
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        ids.append(enc.encode_to_numpy(text[start:end], disallowed_special=())) # encode_ordinary, listless
    data = text.encode()
    drawn = bool(bound) and (document.key or val_key(hashlib.sha256(data))) <= bound
    return drawn, len(data), np.concatenate(ids).astype("<u2")

def work(pipe, tokenizer, field, bound):
    """A worker process: documents in, what they encode to, or the sentence that stops the run, out."""
    enc = load_tokenizer(tokenizer)
    try:
        while True:
            results = []
            for document in pipe.recv():
                try:
                    results.append(encode(enc, document, field, bound))
                except SystemExit as error:
                    results.append(str(error))
                except BaseException as error: # tiktoken's panics are no Exceptions
                    results.append(f"{document.where}: can't be encoded ({brief(error)})")
            pipe.send(results)
    except (EOFError, ConnectionError):
        pass # the main process has ended, or was killed

class Workers:
    """`count` processes, each behind a thread of this one."""
    def __init__(self, count, *args):
        self.count, self.processes, self.idle = count, [], queue.SimpleQueue()
        context = multiprocessing.get_context("spawn") # fork is unsafe where threads run
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) # inherited: Ctrl-C is for this process alone
        for _ in range(count):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=work, args=(theirs, *args), daemon=True))
            self.processes[-1].start()
            theirs.close() # so that each side reads EOF once the other's process is gone
            self.idle.put(ours)
        signal.signal(signal.SIGINT, handler)
        self.threads = ThreadPoolExecutor(count)

    def ask(self, batch):
        pipe = self.idle.get()
        try:
            pipe.send(batch)
            return pipe.recv()
        except (EOFError, ConnectionError):
            sys.exit("a worker process was killed (out of memory?), try again with a lower --num_proc")
        finally:
            self.idle.put(pipe)

    def map(self, documents):
        """Each document with its result, in order. Two batches a worker are under way: memory is bounded."""
        pending = deque()
        def first():
            batch, future = pending.popleft()
            for document, result in zip(batch, future.result()):
                if isinstance(result, str):
                    sys.exit(result)
                yield document, result
        try:
            for batch in batches(documents):
                pending.append((batch, self.threads.submit(self.ask, batch)))
                if len(pending) > 2 * self.count:
                    yield from first()
            while pending:
                yield from first()
        finally:
            for _, future in pending:
                future.cancel()

    def close(self):
        for process in self.processes:
            process.terminate()
        self.threads.shutdown(cancel_futures=True)

def batches(documents):
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text or "") + 100
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch

# ----------------------------------------------------------------------------------------------------------------------
# shards

class Writer:
    """Appends tokens to <split>_00000.bin, _00001.bin, ..., a .tmp until it is whole. `state` is JSON."""
    def __init__(self, folder, split, shard_tokens, limit, state=None):
        self.folder, self.split, self.shard_tokens, self.limit = folder, split, shard_tokens, limit
        self.state = state or {"tokens": 0, "documents": 0, "bytes": 0, "shards": {}}
        self.file = self.reopen() if self.begun() else None

    def path(self):
        return os.path.join(self.folder, f"{self.split}_{len(self.state['shards']):05d}.bin")

    def begun(self):
        """Tokens in the shard that is not whole yet."""
        return self.state["tokens"] - sum(shard["tokens"] for shard in self.state["shards"].values())

    def full(self):
        return self.state["tokens"] >= self.limit

    def reopen(self):
        path, size = self.path(), 2 * self.begun()
        if not os.path.exists(path + ".tmp") and os.path.exists(path):
            os.replace(path, path + ".tmp") # completed, and then the run was killed before it wrote so
        if not os.path.exists(path + ".tmp") or os.path.getsize(path + ".tmp") < size:
            sys.exit(f"{path}.tmp: shorter than progress.json says, remove {self.folder} and start again")
        os.truncate(path + ".tmp", size)
        self.sha256 = file_sha256(path + ".tmp")
        return open(path + ".tmp", "ab")

    def write(self, tokens, save):
        """Appends tokens up to the limit, returns how many; save(n) when n of them ended a shard."""
        done, end = 0, min(len(tokens), self.limit - self.state["tokens"])
        while done < end:
            if not self.file:
                self.sha256, self.file = hashlib.sha256(), open(self.path() + ".tmp", "wb")
            data = tokens[done:min(end, done + self.shard_tokens - self.begun())].tobytes()
            self.file.write(data)
            self.sha256.update(data)
            self.state["tokens"] += len(data) // 2
            done += len(data) // 2
            if self.begun() == self.shard_tokens:
                self.close()
                save(done)
        return done

    def sync(self):
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self):
        """Makes the shard a whole one."""
        if self.file:
            self.sync()
            self.file.close()
            self.file, path = None, self.path()
            os.replace(path + ".tmp", path)
            shard = {"tokens": self.begun(), "sha256": self.sha256.hexdigest()}
            self.state["shards"][os.path.basename(path)] = shard

def write_json(folder, name, value):
    path = os.path.join(folder, name)
    with open(path + ".tmp", "w") as f:
        f.write(json.dumps(value, indent=1) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)

def read_json(folder, name):
    try:
        with open(os.path.join(folder, name)) as f:
            value = json.load(f)
        value["settings"] # which each of our files has
        return value
    except FileNotFoundError:
        sys.exit(f"{os.path.join(folder, name)}: missing, it is written last: is the folder right, and finished?")
    except (OSError, ValueError) as error:
        sys.exit(f"{os.path.join(folder, name)}: can't be read ({brief(error)})")
    except (TypeError, KeyError):
        sys.exit(f"{os.path.join(folder, name)}: not prepare.py's, choose another folder")

def write_meta(folder, enc, settings, writers):
    """Completes a folder."""
    meta = {"tokenizer": enc.name, "vocab_size": enc.n_vocab, "eot": enc.eot_token,
            "dataset": settings["dataset"], "revision": settings["revision"], "settings": settings,
            "shards": {}}
    for writer in writers:
        writer.close()
        meta |= {f"{writer.split}_{key}": writer.state[key] for key in ("tokens", "documents", "bytes")}
        meta["shards"] |= writer.state["shards"]
    counts = np.zeros(enc.n_vocab, np.int64)
    for name in (name for name in meta["shards"] if name.startswith("val")):
        tokens = np.memmap(os.path.join(folder, name), "<u2", "r")
        for i in range(0, len(tokens), BATCH):
            counts += np.bincount(tokens[i:i + BATCH], minlength=enc.n_vocab)
    p = counts[counts > 0] / max(counts.sum(), 1)
    meta["unigram_nats"] = round(float(-(p * np.log(p)).sum()), 6) # of val, a token
    write_json(folder, "meta.json", meta)
    finish(folder)
    print(summary(folder, meta))

def finish(folder):
    if os.path.exists(os.path.join(folder, "progress.json")):
        os.remove(os.path.join(folder, "progress.json"))

def summary(folder, meta):
    counts = [f"{meta[f'{split}_tokens']:,} {split} tokens of {meta[f'{split}_documents']:,} documents"
              for split in ("train", "val")]
    return f"{folder}: {', '.join(counts)}, unigram entropy of val {meta['unigram_nats']:.3f} nats a token"

def check(folder, name, shard):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        sys.exit(f"{path}: missing, remove {folder} and make it again")
    if os.path.getsize(path) != 2 * shard["tokens"] or file_sha256(path).hexdigest() != shard["sha256"]:
        sys.exit(f"{path}: altered, its size or sha256 is not meta.json's, remove {folder} and make it again")

# ----------------------------------------------------------------------------------------------------------------------
# the run

def prepare(cfg, folder):
    enc, (index, count) = load_tokenizer(cfg.tokenizer), part_of(cfg.shard)
    local = is_local(cfg.dataset)
    corpus = Local(cfg) if local else Hub(cfg)
    keys = "name", "split", "text_field", "tokenizer", "total_tokens", "val_tokens", "shard_tokens", "shard"
    settings = {key: getattr(cfg, key) for key in keys} # what the bytes depend on
    settings |= {"dataset": data_name(cfg.dataset) if local else cfg.dataset, "revision": corpus.revision,
                 "source": corpus.fingerprint}
    progress = begin(folder, settings)
    if not progress:
        splits = list(corpus.splits)
        bound = val_bound(corpus, cfg.text_field).hex() if splits == [""] else "" # "": nothing is drawn
        progress = {"settings": settings, "bound": bound, "splits": splits, "place": None, "skip": 0}
    def share(total):
        return total * (index + 1) // count - total * index // count
    train = Writer(folder, "train", cfg.shard_tokens, share(cfg.total_tokens), progress.get("train"))
    val = Writer(folder, "val", cfg.shard_tokens, share(cfg.val_tokens), progress.get("val"))
    splits, place, skip = progress["splits"], progress["place"], progress["skip"]

    def save(splits, place, skip): # splits to read, the first from `place` on, less `skip` tokens
        train.sync()
        val.sync()
        write_json(folder, "progress.json", progress | {"splits": splits, "place": place, "skip": skip,
                                                        "train": train.state, "val": val.state})
    save(splits, place, skip)
    bound = bytes.fromhex(progress["bound"])
    workers = Workers(cfg.num_proc or cores(), cfg.tokenizer, cfg.text_field, bound)
    meter = Meter(corpus, train)
    try:
        while splits:
            for document, (drawn, size, tokens) in workers.map(corpus.documents(splits[0], place)):
                writer = val if drawn or splits[0] == "val" else train
                n = skip + writer.write(tokens[skip:], lambda n: save(splits, document.place, skip + n))
                if n: # else the writer is full
                    if n < len(tokens):
                        size = len(enc.decode_bytes(tokens[document.opens:n].tolist()))
                    writer.state["documents"] += document.opens
                    writer.state["bytes"] += size
                skip = 0
                meter.add(size)
                if splits[0] == "val" and val.full():
                    break
                if splits[0] != "val" and train.full() and (splits[0] or count > 1 or val.state["tokens"]):
                    break # drawing goes on until there is one for validation
            splits, place = splits[1:], None
    finally:
        workers.close()
    meter.show()
    if not train.state["tokens"] or not val.state["tokens"] and count == 1:
        sys.exit(f"{cfg.dataset}: it takes two different documents or more, to train on and to validate with")
    write_meta(folder, enc, settings, [train, val])

def begin(folder, settings):
    """progress.json of the run to go on with, None for a new one; exits if it is complete or another's."""
    os.makedirs(folder, exist_ok=True)
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB) # until this process ends
    except BlockingIOError:
        sys.exit(f"{folder}: another run is writing there, wait for its end or choose another --out_dir")
    except OSError:
        pass # a disk without locks
    for name in ("meta.json", "progress.json"):
        if os.path.exists(os.path.join(folder, name)):
            found = read_json(folder, name)
            for key, value in settings.items():
                before = found.get("settings", {}).get(key)
                if before != value and key == "source":
                    sys.exit(f"{folder}: the names or sizes of its source files are others now, choose another "
                             "--out_dir or remove the folder")
                if before != value:
                    sys.exit(f"{folder}: made with {key}={before!r}, which is {value!r} now, choose another "
                             "--out_dir or remove the folder")
            if name == "meta.json":
                finish(folder)
                print(f"complete already, {summary(folder, found)}")
                sys.exit(0)
            print(f"{folder}: going on after {found['train']['tokens']:,} train tokens")
            return found

def val_bound(corpus, field):
    """The largest val_key of a validation document: 1 in VAL_ONE_IN has none larger. If there is no such
    document, the smallest key of all."""
    bound, smallest = (2**240 // VAL_ONE_IN).to_bytes(30, "big"), b"\xff" * 30
    for document in corpus.documents("", everywhere=True): # about VAL_ONE_IN of them
        if document.opens:
            key = document.key or val_key(hashlib.sha256(text_of(document, field).encode()))
            smallest = min(smallest, key)
        if smallest <= bound:
            return bound
    return smallest

class Meter:
    """Prints tokens, MB/s of text and ETA four times a minute."""
    def __init__(self, corpus, train):
        self.corpus, self.train, self.size = corpus, train, 0
        self.start = self.printed = time.monotonic()
        self.skipped = None # share of the work that an earlier run has done

    def add(self, size):
        self.size += size
        if self.skipped is None:
            self.skipped = self.fraction()
        if time.monotonic() - self.printed >= 15:
            self.show()

    def fraction(self):
        return min(max(self.corpus.fraction(), self.train.state["tokens"] / max(self.train.limit, 1)), 1)

    def show(self):
        self.printed = time.monotonic()
        seconds, done = self.printed - self.start, self.fraction() - (self.skipped or 0)
        eta = timedelta(seconds=int(seconds * (1 - self.fraction()) / done)) if done > 0 else "unknown"
        speed = self.size / 1e6 / seconds
        print(f"{self.train.state['tokens']:,} train tokens, {speed:.1f} MB/s, ETA {eta}", flush=True)

def merge(cfg):
    """Joins the folders of --shard=0/n to n-1/n in that order."""
    sources = [(read_json(folder, "meta.json"), folder) for folder in cfg.merge.split(",")]
    sources.sort(key=lambda source: part_of(source[0]["settings"]["shard"]))
    first, n = sources[0][0], len(sources)
    for i, (meta, folder) in enumerate(sources):
        if meta["settings"] != first["settings"] | {"shard": f"{i}/{n}"}:
            sys.exit(f"--merge: {folder} is not what --shard={i}/{n} makes with the data set and the "
                     f"settings of {sources[0][1]}")
    settings = first["settings"] | {"shard": "0/1"} # as one run on one machine
    folder = cfg.out_dir or os.path.join("data", f"{data_name(first['dataset'])}-{first['tokenizer']}")
    begin(folder, settings)
    writers = [Writer(folder, split, settings["shard_tokens"], sys.maxsize) for split in ("train", "val")]
    for writer in writers:
        for meta, source in sources:
            for name, shard in meta["shards"].items():
                if name.startswith(writer.split):
                    check(source, name, shard)
                    tokens = np.memmap(os.path.join(source, name), "<u2", "r")
                    for i in range(0, len(tokens), BATCH):
                        writer.write(tokens[i:i + BATCH], lambda n: None)
            for key in ("documents", "bytes"):
                writer.state[key] += meta[f"{writer.split}_{key}"]
        if not writer.state["tokens"]:
            sys.exit(f"--merge: none of the folders has {writer.split} tokens")
    write_meta(folder, load_tokenizer(first["tokenizer"]), settings, writers)

def part_of(shard):
    """i/n as two integers."""
    part = re.fullmatch(r"(\d+)/(\d+)", shard)
    index, count = map(int, part.groups()) if part else (0, 0)
    if index >= count:
        sys.exit(f"--shard={shard}: it must be i/n with i from 0 to n-1")
    return index, count

def is_local(dataset):
    return dataset == "stdlib" or os.path.exists(dataset) or dataset.endswith(SUFFIXES) or bool(
        re.search(r"^[./~]|[*?[]", dataset))

def data_name(dataset):
    """The last part of a name, a path or a glob (there: before the wild cards), without a file's suffix."""
    path = os.path.expanduser(dataset)
    path = os.path.abspath(path if os.path.exists(path) else re.split(r"[^/]*[*?[]", path)[0])
    return re.sub(r"\.(jsonl|jsonl\.zst|parquet|txt)$", "", os.path.basename(path))

def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() # macOS: all

def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        sys.exit(f"--dataset: this kind needs the package {package}: pip install {package}")

def brief(error):
    """An error's kind and first line."""
    return f"{type(error).__name__}: {str(error).strip()[:200]}".splitlines()[0]

def file_sha256(path):
    sha256 = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            sha256.update(block)
    return sha256

def main():
    sys.stdout and sys.stdout.reconfigure(errors="replace") # for a terminal that lacks a character of a path
    cfg = config.load(PrepareConfig)
    for key, least in (("total_tokens", 1), ("val_tokens", 1), ("shard_tokens", 1), ("num_proc", 0)):
        if getattr(cfg, key) < least:
            sys.exit(f"--{key}={getattr(cfg, key)}: it must be at least {least}")
    index, count = part_of(cfg.shard)
    part = f"-{index}of{count}" if count > 1 else ""
    folder = cfg.out_dir or os.path.join("data", f"{data_name(cfg.dataset)}-{cfg.tokenizer}{part}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if cfg.merge:
            merge(cfg)
        elif cfg.verify:
            meta = read_json(folder, "meta.json")
            for name, shard in meta["shards"].items():
                check(folder, name, shard)
            print(f"{folder}: all {len(meta['shards'])} shards are as they were written")
        else:
            prepare(cfg, folder)
    except KeyboardInterrupt:
        sys.exit("interrupted, the same command goes on after the last whole shard")
    except OSError as error: # a full disk, a file that can't be read
        sys.exit(f"{error.filename or folder}: {error.strerror or error}")

if __name__ == "__main__": # workers import this file
    main()
