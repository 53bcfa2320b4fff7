"""
Text to uint16 shards, the form train.py reads.

    python prepare.py                                           # Python's own library as bytes, no network: data/stdlib-bytes
    python prepare.py --dataset=slimpajama --tokenizer=gpt2     # 15B tokens streamed from the hub, 30 GB
    python prepare.py --dataset=DIR --tokenizer=gpt2            # your .jsonl, .jsonl.zst, .parquet, .txt, or a glob of them
    python prepare.py --dataset=DIR --tokenizer=gpt2 --verify=True                  # hash the finished shards again
    python prepare.py --dataset=DIR --tokenizer=gpt2 --shard=0/2                    # one of two machines, then
    python prepare.py --merge=data/DIR-gpt2-0of2,data/DIR-gpt2-1of2                 # both parts as one folder

A folder data/<name>-<tokenizer> holds train_00000.bin, ..., val_00000.bin, ... (raw little-endian uint16, every document
starts with eot, a document may continue in the next shard) and meta.json, which is written last. A killed run continues
from progress.json when started again, and ends with the same bytes. Speed is tiktoken's: about 5 MB/s of text a core.
"""
import glob
import hashlib
import importlib
import json
import math
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
from typing import NamedTuple

import numpy as np
import tiktoken

import config

SLIMPAJAMA = "cerebras/SlimPajama-627B", "2d0accdd58c5d5511943ca1f5ff0e3eb5e293543" # hub id, revision
SUFFIXES = (".jsonl", ".jsonl.zst", ".parquet", ".txt")
VAL_ONE_IN = 200 # documents, where the source has no validation split
BATCH = 1 << 20 # characters of text a worker is sent at a time
WHITE_RUN = 900_000 # characters; tiktoken's regex gives up at 999,999 of white space before text
ATTEMPTS = 10 # at the hub without one new document, waiting 1, 2, 4, ..., 64, 64 s between them

@dataclass(frozen=True)
class PrepareConfig:
    # source
    dataset: str = "stdlib" # stdlib, slimpajama, a hub id, or local files: a folder or a glob
    name: str = "" # of a hub data set: its configuration
    split: str = "train" # of a hub data set
    revision: str = "" # of a hub data set: a commit; slimpajama has its own
    text_field: str = "text" # of a record
    # tokens
    tokenizer: str = "bytes" # bytes, gpt2
    total_tokens: int = 15_000_000_000 # of training, at most
    val_tokens: int = 10_000_000 # of validation, at most
    shard_tokens: int = 100_000_000 # a file, 2 bytes each
    # work
    out_dir: str = "" # "": data/<last part of the data set's name>-<tokenizer>
    num_proc: int = 0 # worker processes, 0: one a core
    shard: str = "0/1" # i/n: every n-th source file from the i-th on, and 1/n of the tokens
    merge: str = "" # folders, comma-separated: join what the n runs of --shard=i/n made
    verify: bool = False # hash the shards of a finished folder again

def load_tokenizer(name):
    """The tiktoken.Encoding called `name`: gpt2 (50,257 ids) or bytes (ids 0-255 and eot 256)."""
    if name == "bytes": # 64 characters a piece: the pieces have no effect on the ids, only on the speed
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name != "gpt2":
        sys.exit(f"--tokenizer={name}: it must be gpt2 or bytes")
    try:
        enc = tiktoken.get_encoding("gpt2")
    except OSError as error: # requests' errors are OSErrors
        sys.exit(f"tiktoken can't fetch the GPT-2 vocabulary ({type(error).__name__}): connect to the network once, or "
                 "set TIKTOKEN_CACHE_DIR to a folder that holds it")
    if enc.max_token_value >= 2**16:
        sys.exit(f"tokenizer {name}: its largest id, {enc.max_token_value}, does not fit uint16")
    return enc

# ----------------------------------------------------------------------------------------------------------------------
# sources: each yields its documents in a fixed order, from any place on

class Document(NamedTuple):
    place: object # JSON: what `documents` takes to start again with this one
    where: str # file and line, for messages
    text: object # str, or bytes: a line of JSON, parsed by the worker
    digest: bytes # sha256 of the whole document's text; b"": the worker takes it
    opens: bool # False: goes on with the document before

class Local:
    """Files on this machine. `splits` maps "val" and "train" to sorted paths, or "" where validation is to be drawn."""
    def __init__(self, cfg):
        self.text_field, self.read = cfg.text_field, {} # path: bytes read so far, as they lie (compressed)
        self.revision = platform.python_version() if cfg.dataset == "stdlib" else ""
        root, self.every = stdlib_files() if cfg.dataset == "stdlib" else local_files(os.path.expanduser(cfg.dataset))
        listing = [(os.path.relpath(path, root), os.path.getsize(path)) for split in self.every.values() for path in split]
        self.fingerprint = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
        index, count = part_of(cfg)
        self.splits = {split: paths[index::count] for split, paths in self.every.items()}
        if not self.splits.get("train", self.splits.get("")):
            sys.exit(f"--shard={cfg.shard}: {cfg.dataset} has fewer training files than that")
        self.total = sum(os.path.getsize(path) for paths in self.splits.values() for path in paths)

    def fraction(self):
        return sum(self.read.values()) / self.total

    def documents(self, split, place=None, everywhere=False):
        """The documents of a split from `place` on, in this machine's part of the files or in all of them."""
        place = place or [0, 0] # file, record in it
        for i, path in enumerate((self.every if everywhere else self.splits)[split]):
            if i < place[0]:
                self.read[path] = os.path.getsize(path)
                continue
            for record, document in enumerate(self.records(path)):
                if [i, record] >= place:
                    yield Document([i, record], *document)

    def records(self, path):
        """(where, text, digest, opens) of each record of a file."""
        if path.endswith((".jsonl", ".jsonl.zst")):
            return ((f"{path}:{n}", line, b"", True) for n, line in enumerate(self.lines(path), 1) if line.strip())
        if path.endswith(".parquet"):
            return ((f"{path}, row {n}", text, b"", True) for n, text in enumerate(self.rows(path)))
        digest = file_sha256(path).digest() # the file is one document, read in pieces: it may exceed memory
        return ((path, text, digest, n == 0) for n, text in enumerate(self.pieces(path)))

    def chunks(self, path):
        """The bytes of a file, decompressed. A .zst is a row of zstd frames and has to end where one does."""
        zstd, frame = need("zstandard") if path.endswith(".zst") else None, None
        with open(path, "rb") as f:
            while block := (frame and frame.unused_data) or f.read(1 << 14): # it may expand 32,000 times
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
        parquet, damaged = need("pyarrow.parquet"), need("pyarrow").ArrowException
        try:
            f = parquet.ParquetFile(path)
            if self.text_field not in f.schema_arrow.names:
                sys.exit(f"{path}: no column {self.text_field!r}, set --text_field to one of {f.schema_arrow.names}")
            for batch in f.iter_batches(batch_size=64, columns=[self.text_field]):
                self.read[path] = self.read.get(path, 0) + os.path.getsize(path) * len(batch) / f.metadata.num_rows
                yield from batch.column(0).to_pylist()
        except damaged as error:
            sys.exit(f"{path}: damaged or not a parquet file ({brief(error)})")

    def pieces(self, path):
        """A file's text in pieces that encode as the whole does: each ends before white space that follows text, which
        no piece of tiktoken's crosses; where there is none in a million characters, it is cut all the same."""
        text = ""
        with open(path, encoding="utf-8", newline="") as f:
            try:
                while block := f.read(BATCH):
                    self.read[path] = f.buffer.tell()
                    text += block
                    parts = text.rsplit(None, 1) # the last word, and what is before the white space before it
                    cut = len(parts[0]) if len(parts) == 2 else len(text)
                    yield text[:cut]
                    text = text[cut:]
            except UnicodeDecodeError as error:
                sys.exit(f"{path}: not UTF-8 ({error.reason} near byte {self.read.get(path, 0)})")
        yield text

def local_files(dataset):
    """The root and the splits of a folder (SlimPajama's train/ and validation/ are recognised) or of a glob."""
    def find(pattern):
        return sorted(path for path in glob.glob(pattern, recursive=True) if path.endswith(SUFFIXES) and os.path.isfile(path))
    if not os.path.isdir(dataset):
        root, splits = os.path.dirname(dataset), {"": [dataset] if os.path.isfile(dataset) else find(dataset)}
    elif os.path.isdir(os.path.join(dataset, "train")) and os.path.isdir(os.path.join(dataset, "validation")):
        root = glob.escape(dataset)
        splits = {"val": find(f"{root}/validation/**"), "train": find(f"{root}/train/**")}
    else:
        root, splits = dataset, {"": find(f"{glob.escape(dataset)}/**")}
    for split, paths in splits.items():
        if not all(path.endswith(SUFFIXES) for path in paths) or not paths:
            sys.exit(f"{dataset}: no {' or '.join(SUFFIXES)} file " + {"val": "in validation/", "train": "in train/"}.get(split, ""))
    return root, splits

def stdlib_files():
    """The root and the Python sources of the standard library: no tests, UTF-8, exact duplicates dropped."""
    root, texts = sysconfig.get_paths()["stdlib"], {}
    for path in sorted(glob.glob(f"{glob.escape(root)}/**/*.py", recursive=True)):
        folders = os.path.relpath(path, root).split(os.sep)[:-1]
        if not any(re.fullmatch("(site|dist)-packages|(.*_)?tests?", folder) for folder in folders):
            with open(path, "rb") as f:
                source = f.read()
            try:
                source.decode()
            except UnicodeDecodeError:
                continue
            texts.setdefault(source, path)
    return root, {"": list(texts.values())}

class Hub:
    """A data set of the Hugging Face hub, streamed. It answers 429 or 503 now and then, and connections break: both are
    waited for. A place is `datasets`' own state, so that going on skips whole files without fetching them."""
    def __init__(self, cfg):
        self.id, self.revision = SLIMPAJAMA if cfg.dataset == "slimpajama" else (cfg.dataset, cfg.revision)
        self.cfg, self.fingerprint, self.reached = cfg, f"{self.id} {cfg.name} {cfg.split}", False
        self.datasets = need("datasets")
        self.datasets.utils.logging.set_verbosity_error() # what matters, `wait` says
        need("huggingface_hub").logging.set_verbosity_error()

    @property
    def splits(self):
        return ["val", "train"] if "validation" in self.open() and self.cfg.split != "validation" else [""]

    def fraction(self):
        return 0.0 # of an unknown whole

    def open(self):
        for failures in range(1, ATTEMPTS + 1):
            try:
                streams = self.datasets.load_dataset(self.id, self.cfg.name or None, revision=self.revision or None,
                                                     streaming=True)
                self.reached = True
                return streams
            except Exception as error: # of half a dozen libraries
                self.wait(error, failures)

    def documents(self, split, place=None, everywhere=False):
        index, count = part_of(self.cfg)
        key, field, failures = "validation" if split == "val" else self.cfg.split, self.cfg.text_field, 0
        while True:
            try:
                streams = self.open()
                if key not in streams:
                    sys.exit(f"{self.id}: no split {key!r}, set --split to one of {sorted(streams)}")
                stream = streams[key]
                if count > 1 and not everywhere:
                    if count > stream.num_shards:
                        sys.exit(f"--shard={self.cfg.shard}: {self.id} has only {stream.num_shards} files in {key}")
                    stream = stream.shard(num_shards=count, index=index, contiguous=False)
                if place:
                    stream.load_state_dict(place)
                place = stream.state_dict()
                for row in stream:
                    yield Document(place, f"{self.id}, {key}", row.get(field, row), b"", True)
                    place, failures = stream.state_dict(), 0
                return
            except Exception as error:
                failures += 1
                self.wait(error, failures)

    def wait(self, error, failures):
        """Sleeps before another attempt; exits where none can help."""
        status, cause = 0, error
        while cause and not status:
            status = getattr(getattr(cause, "response", None), "status_code", 0)
            cause = cause.__cause__ or cause.__context__
        if not self.reached and status != 429 and status < 500:
            sys.exit(f"{self.cfg.dataset}: neither a local file or folder nor a data set of the hub that can be reached "
                     f"({brief(error)})")
        if failures == ATTEMPTS:
            sys.exit(f"{self.id}: {ATTEMPTS} attempts failed ({brief(error)}), start the same command again later")
        seconds = min(2 ** (failures - 1), 64)
        print(f"{self.id}: {brief(error)}; attempt {failures + 1} of {ATTEMPTS} in {seconds} s")
        time.sleep(seconds)

# ----------------------------------------------------------------------------------------------------------------------
# workers: text to tokens

def encode(enc, text):
    """The ids of `text`: spelled-out special tokens are ordinary text, lone surrogates become U+FFFD, and white space is
    cut where a run of it is too long for tiktoken."""
    cuts = []
    if len(text) > WHITE_RUN:
        cuts = [cut for run in re.finditer(r"\s+", text) for cut in range(run.start() + WHITE_RUN, run.end(), WHITE_RUN)]
    ids = []
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        ids += enc.encode_ordinary(text[start:end])
    return ids

def text_of(document, field):
    """The text of a document, of its JSON if that is what it holds."""
    where, text = document.where, document.text
    if isinstance(text, bytes):
        try:
            record = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            sys.exit(f"{where}: not a JSON record ({brief(error)})")
        text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        sys.exit(f"{where}: no text in its field {field!r}, name the right one with --text_field")
    return text

def sha256_of(text):
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

def encode_document(enc, document, field, bound):
    """Whether it is validation (by its sha256), its bytes of UTF-8, its tokens as uint16."""
    text = text_of(document, field)
    val = bound and (document.digest or sha256_of(text)) <= bound
    return val, len(text.encode("utf-8", "surrogatepass")), np.array([enc.eot_token] * document.opens + encode(enc, text), "<u2")

def work(pipe, tokenizer, field, bound):
    """A worker process: documents in, results out, or the sentence that stops the run."""
    enc = load_tokenizer(tokenizer)
    try:
        while True:
            reply = []
            for document in pipe.recv():
                try:
                    reply.append(encode_document(enc, document, field, bound))
                except SystemExit as error:
                    reply.append(str(error))
                except BaseException as error: # tiktoken's panics are no Exceptions
                    reply.append(f"{document.where}: can't be encoded ({brief(error)})")
            pipe.send(reply)
    except (EOFError, ConnectionError):
        pass # the main process has ended or was killed

class Workers:
    """`count` processes, each behind a thread of this one; `map` gives the documents with their results in order."""
    def __init__(self, count, *args):
        self.count, self.idle = count, queue.SimpleQueue()
        context, self.processes = multiprocessing.get_context("spawn"), [] # fork is unsafe where threads run
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) # they inherit it: Ctrl-C is for this process
        for _ in range(count):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=work, args=(theirs, *args), daemon=True))
            self.processes[-1].start()
            theirs.close() # so that each end reads EOF when the other's process dies
            self.idle.put(ours)
        signal.signal(signal.SIGINT, handler)
        self.threads = ThreadPoolExecutor(count)

    def ask(self, batch):
        pipe = self.idle.get()
        try:
            pipe.send(batch)
            return pipe.recv()
        except (EOFError, ConnectionError):
            sys.exit("a worker process was killed (out of memory?), start the same command again with a lower --num_proc")
        finally:
            self.idle.put(pipe)

    def map(self, documents):
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
                if len(pending) > 2 * self.count: # the next is ready when a worker is
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
    if batch:
        yield batch

# ----------------------------------------------------------------------------------------------------------------------
# shards

class Writer:
    """Appends tokens to <split>_00000.bin, _00001.bin, ..., as .tmp until they are whole, `limit` tokens at most."""
    def __init__(self, folder, split, shard_tokens, limit, state=None):
        self.folder, self.split, self.shard_tokens, self.limit, self.file = folder, split, shard_tokens, limit, None
        self.state = state or dict(tokens=0, documents=0, bytes=0, shards={}) # shards: name: tokens, sha256
        if self.kept():
            self.reopen()

    def kept(self):
        """Tokens in the shard that is not whole yet."""
        return self.state["tokens"] - sum(shard["tokens"] for shard in self.state["shards"].values())

    def path(self):
        return os.path.join(self.folder, f"{self.split}_{len(self.state['shards']):05d}.bin")

    def full(self):
        return self.state["tokens"] >= self.limit

    def reopen(self):
        path, size = self.path(), 2 * self.kept()
        if not os.path.exists(path + ".tmp") and os.path.exists(path):
            os.replace(path, path + ".tmp") # it was completed after the progress was saved
        if not os.path.exists(path + ".tmp") or os.path.getsize(path + ".tmp") < size:
            sys.exit(f"{path}.tmp: shorter than progress.json says, remove {self.folder} and start again")
        os.truncate(path + ".tmp", size)
        self.sha256, self.file = file_sha256(path + ".tmp"), open(path + ".tmp", "ab")

    def write(self, tokens, save):
        """Appends up to the limit and returns how many; save(n) whenever the first n of them have ended a shard."""
        done, end = 0, min(len(tokens), self.limit - self.state["tokens"])
        while done < end:
            if self.file is None:
                self.sha256, self.file = hashlib.sha256(), open(self.path() + ".tmp", "wb")
            data = tokens[done:min(end, done + self.shard_tokens - self.kept())].tobytes()
            self.file.write(data)
            self.sha256.update(data)
            self.state["tokens"] += len(data) // 2
            done += len(data) // 2
            if self.kept() == self.shard_tokens:
                self.close()
                save(done)
        return done

    def sync(self):
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self):
        """Completes the shard."""
        if self.file:
            self.sync()
            self.file.close()
            self.file, path, tokens = None, self.path(), self.kept()
            os.replace(path + ".tmp", path)
            self.state["shards"][os.path.basename(path)] = {"tokens": tokens, "sha256": self.sha256.hexdigest()}

def write_json(path, value):
    with open(path + ".tmp", "w") as f:
        f.write(json.dumps(value, indent=1) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)

def write_meta(folder, enc, settings, train, val):
    """The folder's last file, which makes it complete."""
    counts = np.zeros(enc.n_vocab, np.int64)
    for name in val.state["shards"]:
        tokens = np.memmap(os.path.join(folder, name), "<u2", "r")
        for i in range(0, len(tokens), BATCH):
            counts += np.bincount(tokens[i:i + BATCH], minlength=enc.n_vocab)
    p = counts[counts > 0] / counts.sum()
    entropy = float(-(p * np.log(p)).sum()) # nats a token; summed in a fixed order
    meta = {"tokenizer": enc.name, "vocab_size": enc.n_vocab, "eot": enc.eot_token, "dataset": settings["dataset"],
            "revision": settings["revision"], "settings": settings, "unigram_nats": round(entropy, 6)}
    for writer in (train, val):
        meta |= {f"{writer.split}_{key}": writer.state[key] for key in ("tokens", "documents", "bytes")}
    meta["shards"] = train.state["shards"] | val.state["shards"]
    write_json(os.path.join(folder, "meta.json"), meta)
    if os.path.exists(os.path.join(folder, "progress.json")):
        os.remove(os.path.join(folder, "progress.json"))
    print(summary(folder, meta))

def summary(folder, meta):
    return f"{folder}: " + ", ".join(f"{meta[f'{s}_tokens']:,} {s} tokens of {meta[f'{s}_documents']:,} documents"
        for s in ("train", "val")) + f"; unigram entropy of val {meta['unigram_nats']:.3f} nats a token"

# ----------------------------------------------------------------------------------------------------------------------
# the run

def part_of(cfg):
    """--shard=i/n as two integers."""
    part = re.fullmatch(r"(\d+)/(\d+)", cfg.shard)
    index, count = map(int, part.groups()) if part else (0, 0)
    if not index < count:
        sys.exit(f"--shard={cfg.shard}: it must be i/n with 0 <= i < n")
    return index, count

def data_name(dataset):
    """The last part of a data set's name, path or glob."""
    path = os.path.abspath(os.path.expanduser(dataset))
    while re.search(r"[*?[]", os.path.basename(path)):
        path = os.path.dirname(path)
    return re.sub(r"\.(jsonl|jsonl\.zst|parquet|txt)$", "", os.path.basename(path))

def is_local(dataset):
    return dataset == "stdlib" or bool(os.path.exists(dataset) or re.search(r"^[./~]|[*?[]", dataset) or dataset.endswith(SUFFIXES))

def val_bound(corpus, field):
    """The largest sha256 of a validation document: 1 in VAL_ONE_IN has it, or where none has, the smallest there is."""
    bound, smallest = (2**256 // VAL_ONE_IN).to_bytes(32, "big"), b"\xff" * 33
    for document in corpus.documents("", everywhere=True): # about VAL_ONE_IN of them
        if document.opens:
            smallest = min(smallest, document.digest or sha256_of(text_of(document, field)))
            if smallest <= bound:
                return bound
    return smallest

def begin(folder, settings):
    """progress.json of a run to go on with, None for a new one; ends where the folder is complete."""
    for name in ("meta.json", "progress.json"):
        if os.path.exists(os.path.join(folder, name)):
            found = read_json(os.path.join(folder, name))
            for key, value in settings.items():
                if found["settings"].get(key) != value:
                    sys.exit(f"{folder} was made with {key}={found['settings'].get(key)!r}, now it is {value!r}: remove the "
                             "folder or choose another --out_dir")
            if name == "meta.json":
                print(f"complete already: {summary(folder, found)}")
                sys.exit(0)
            print(f"{folder}: going on after {found['train']['tokens']:,} train tokens")
            return found
    os.makedirs(folder, exist_ok=True)

def prepare(cfg, folder):
    enc, (index, count) = load_tokenizer(cfg.tokenizer), part_of(cfg)
    local = is_local(cfg.dataset)
    corpus = Local(cfg) if local else Hub(cfg)
    settings = {key: getattr(cfg, key) for key in ("name", "split", "text_field", "tokenizer", "total_tokens", "val_tokens",
                                                   "shard_tokens", "shard")}
    settings |= {"dataset": data_name(cfg.dataset) if local else cfg.dataset, "revision": corpus.revision,
                 "source": corpus.fingerprint}
    progress = begin(folder, settings)
    splits = list(corpus.splits)
    if not progress:
        bound = "" if splits != [""] else val_bound(corpus, cfg.text_field).hex()
        progress = {"settings": settings, "bound": bound, "split": splits[0], "place": None, "skip": 0}
    limits = {"train": cfg.total_tokens, "val": cfg.val_tokens}
    train, val = [Writer(folder, split, cfg.shard_tokens, limit * (index + 1) // count - limit * index // count,
                         progress.get(split)) for split, limit in limits.items()]

    def save(split, place, skip): # place: a document's, of which `skip` tokens are written
        for writer in (train, val):
            writer.sync()
        write_json(os.path.join(folder, "progress.json"), progress | {"split": split, "place": place, "skip": skip,
                                                                      "train": train.state, "val": val.state})

    split, place, skip = progress["split"], progress["place"], progress["skip"]
    save(split, place, skip)
    workers = Workers(cfg.num_proc or cores(), cfg.tokenizer, cfg.text_field, bytes.fromhex(progress["bound"]))
    meter = Meter()
    try:
        for split in splits[splits.index(split):]:
            for document, (is_val, size, tokens) in workers.map(corpus.documents(split, place)):
                writer = val if split == "val" or is_val else train
                n = skip + writer.write(tokens[skip:], lambda n: save(split, document.place, skip + n))
                if n:
                    writer.state["documents"] += document.opens
                    writer.state["bytes"] += size if n == len(tokens) else len(enc.decode_bytes(tokens[document.opens:n].tolist()))
                skip = 0
                meter.update(train.state["tokens"] + val.state["tokens"], size,
                             max(corpus.fraction(), train.state["tokens"] / train.limit))
                if (val if split == "val" else train).full() and (split or count > 1 or val.state["tokens"]):
                    break
            place = None
    finally:
        workers.close()
    for writer in (train, val):
        writer.close()
        if not writer.state["tokens"] and (count == 1 or writer is train):
            sys.exit(f"{cfg.dataset}: it takes two different documents or more, one to train on and one to validate with")
    write_meta(folder, enc, settings, train, val)

class Meter:
    """Prints tokens, MB/s of text and ETA a few times a minute."""
    def __init__(self):
        self.start, self.size = None, 0

    def update(self, tokens, size, fraction):
        now = time.monotonic()
        if self.start is None:
            self.start, self.first, self.printed = now, fraction, now
        self.size += size # bytes
        if now - self.printed >= 15:
            self.printed, seconds = now, now - self.start
            left = seconds * (1 - fraction) / max(fraction - self.first, 1e-9)
            print(f"{tokens:,} tokens, {self.size / 1e6 / seconds:.1f} MB/s, ETA {left / 60:.0f} min")

def merge(cfg):
    """Joins the folders of --shard=0/n ... --shard=n-1/n, in that order."""
    metas = {}
    for folder in cfg.merge.split(","):
        meta = read_json(os.path.join(folder, "meta.json"))
        metas[part_of(PrepareConfig(shard=meta["settings"]["shard"]))] = folder, meta
    parts = sorted(metas)
    first = metas[parts[0]][1]
    if len(cfg.merge.split(",")) != len(metas) or parts != [(i, len(parts)) for i in range(len(parts))] or any(
            meta["settings"] | {"shard": ""} != first["settings"] | {"shard": ""} for _, meta in metas.values()):
        sys.exit(f"--merge={cfg.merge}: not the {parts[0][1]} folders of --shard=0/{parts[0][1]} and so on, of one data set with "
                 "the same settings")
    settings = first["settings"] | {"shard": "0/1"}
    folder = cfg.out_dir or os.path.join("data", f"{data_name(first['dataset'])}-{first['tokenizer']}")
    begin(folder, settings)
    writers = [Writer(folder, split, settings["shard_tokens"], sys.maxsize) for split in ("train", "val")]
    for writer in writers:
        for part in parts:
            source, meta = metas[part]
            for name in meta["shards"]:
                if name.startswith(writer.split):
                    check(source, name, meta["shards"][name])
                    tokens = np.memmap(os.path.join(source, name), "<u2", "r")
                    for i in range(0, len(tokens), BATCH):
                        writer.write(tokens[i:i + BATCH], lambda n: None)
            for key in ("documents", "bytes"):
                writer.state[key] += meta[f"{writer.split}_{key}"]
        writer.close()
        if not writer.state["tokens"]:
            sys.exit(f"--merge={cfg.merge}: no {writer.split} tokens in any of them")
    write_meta(folder, load_tokenizer(first["tokenizer"]), settings, *writers)

def check(folder, name, shard):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        sys.exit(f"{path}: missing, make the folder again")
    if os.path.getsize(path) != 2 * shard["tokens"] or file_sha256(path).hexdigest() != shard["sha256"]:
        sys.exit(f"{path}: altered, its size or sha256 is not that of meta.json, make the folder again")

def verify(folder):
    meta = read_json(os.path.join(folder, "meta.json"))
    for name, shard in meta["shards"].items():
        check(folder, name, shard)
    print(f"{folder}: {len(meta['shards'])} shards verified")

# small things

def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        sys.exit(f"this data set needs the package {module.split('.')[0]}: pip install {module.split('.')[0]}")

def brief(error):
    """An error's kind and first line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"

def file_sha256(path):
    sha256 = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            sha256.update(block)
    return sha256

def read_json(path):
    try:
        with open(path) as f:
            return json.load(f)
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: can't be read ({brief(error)})")

def main():
    cfg = config.load(PrepareConfig)
    for key in ("total_tokens", "val_tokens", "shard_tokens"):
        if getattr(cfg, key) < 1:
            sys.exit(f"--{key}={getattr(cfg, key)}: it must be at least 1")
    index, count = part_of(cfg)
    part = f"-{index}of{count}" if count > 1 else ""
    folder = cfg.out_dir or os.path.join("data", f"{data_name(cfg.dataset)}-{cfg.tokenizer}{part}")
    try:
        if cfg.merge:
            merge(cfg)
        elif cfg.verify:
            verify(folder)
        else:
            prepare(cfg, folder)
    except KeyboardInterrupt:
        sys.exit("interrupted, the same command goes on after the last whole shard")
    except OSError as error:
        sys.exit(f"{error.filename or folder}: {error.strerror or brief(error)}")

if __name__ == "__main__": # workers import this file
    main()
