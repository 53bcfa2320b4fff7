"""
The scripts as their users run them: subprocesses, real files, kills, two ranks on gloo, exit codes and messages.

    pytest test_scripts.py                                      # CPU
    TIKTOKEN_CACHE_DIR=DIR pytest test_scripts.py               # also what needs the GPT-2 vocabulary offline
"""
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

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

def two_at_a_time(f, arguments):
    """[f(*a) for a in arguments], two processes at once: most of a run is importing torch."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda a: f(*a), arguments))

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
    flags = outs / "gdn", "--prompt=ab", "--max_new_tokens=60"
    first, again, other, two = two_at_a_time(sample, [(*flags, f"--seed={s}", f"--num_samples={n}")
                                                      for s, n in ((1, 1), (1, 1), (2, 1), (1, 2))])
    assert first.returncode == 0 and first.stdout.startswith("ab"), first.stderr
    assert first.stdout == again.stdout != other.stdout
    assert "prompt: 3 tokens" in first.stderr and "tok/s" in first.stderr and str(outs / "gdn") in first.stderr
    one, rule, rest = two.stdout.partition("-" * 80)
    assert one == first.stdout and rest.strip().startswith("ab") and rest.strip() != one.strip()

def test_sample_empty_prompt_and_top_k_beyond_the_vocabulary(outs):
    p = sample(outs / "gla", "--max_new_tokens=20", "--top_k=1000000", "--top_p=0.9")
    assert p.returncode == 0 and "prompt: 1 tokens" in p.stderr and p.stdout.strip(), p.stderr

def test_sample_reads_long_prompts_from_a_file(outs, tmp_path):
    rng = random.Random(0)
    text = "".join(rng.choice("abcdefgh \r\n") for _ in range(20_000 - 1))
    (tmp_path / "story.txt").write_text(text, newline="")
    flags = f"--prompt=@{tmp_path / 'story.txt'}", "--temperature=0", "--max_new_tokens=4"
    from sample import Decoder, generate, prefill
    for mixer, p in zip(SMALL_MODELS, two_at_a_time(sample, [(outs / mixer, *flags) for mixer in SMALL_MODELS])):
        assert p.returncode == 0 and "prompt: 20,000 tokens" in p.stderr, p.stderr
        if mixer != "attention": # quadratic: seconds
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

TINY = ["--n_layer=1", "--n_embd=32", "--n_head=2", "--d_key=8", "--d_value=8", "--d_mlp=48", "--seq_len=64", "--batch_size=2"]

@pytest.fixture(scope="module")
def bench_rows(tmp_path_factory):
    """stdout of bench.py without --what on small models, and the rows of its JSON by table."""
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    p = run("bench.py", *TINY, f"--json={path}")
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
        "sample": "model mixer dtype pass batch context ms p10 p90 first_s tok_s",
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
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6) and ("saved_gb" in row) == (part == "fwd+bwd")
        reference = "gla_chunked" if "sdpa" in op else op
        assert row["ratio"] == pytest.approx(row["ms"] / kernels[reference, part]["ms"])
    assert kernels["gla_chunked", "fwd"]["bytes"] == 4 * B * T * H * (3 * K + 2 * V) # q k g, v o
    assert kernels["gated_delta_rule_chunked", "fwd+bwd"]["bytes"] == 4 * B * T * H * (3 * (2 * K + V + 2) + 2 * V)
    assert [row["mixer"] for row in tables["train"]] == ["gla", "gdn", "attention"]
    for row in tables["train"]:
        assert row["tok_s"] == pytest.approx(2 * 64 / row["ms"] * 1000)
    for row in tables["sample"]:
        assert row["tok_s"] == pytest.approx(row["batch"] * (row["context"] if row["pass"] == "prefill" else 1) / row["ms"] * 1000)
    states = {mixer: [row["state_mb"] for row in tables["memory"] if row["mixer"] == mixer] for mixer in ("gla", "gdn", "attention")}
    assert states["gla"] == 4 * [4 * 2 * 8 * 8 / 1e6] # fp32 S
    assert states["gdn"] == 4 * [4 * (2 * 8 * 8 + 3 * 48) / 1e6] # and convolutions
    assert states["attention"] == [4 * 2 * 2 * 8 * T / 1e6 for T in (128, 256, 512, 1024)]

def test_bench_of_one_config_and_one_table(tmp_path):
    p = run(os.path.join(ROOT, "bench.py"), os.path.join(ROOT, "config", "tiny.py"), *TINY, "--what=memory", cwd=tmp_path)
    assert p.returncode == 0, p.stderr
    assert re.findall("^(operators|training step|generation|memory)", p.stdout, re.M) == ["memory"]
    assert len(re.findall(r"^tiny +\d+ ", p.stdout, re.M)) == 4 # lengths

def test_bench_counts_what_is_saved():
    import bench
    x = torch.ones(1000, requires_grad=True)
    assert bench.saved_bytes(lambda: x.exp(), [x]) == 4000 # its result, which is what its backward needs
    assert bench.saved_bytes(lambda: x * x, [x]) == 4000 # the result alone
    assert bench.saved_bytes(lambda: (x.exp() * 2).exp(), [x]) == 8000

def test_bench_knows_kinds_of_kernels():
    from bench import kind_of
    for kernel, kind in (("gla_fwd_out_kernel", "mixer kernels"), ("gdn_bwd_wy_kernel", "mixer kernels"),
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
                print(json.dumps({"step": step, "tokens": step * 1000, "loss": loss, "val_loss": 1.0} if step % 10 == 0 else
                                 {"step": step, "tokens": step * 1000, "loss": loss}), file=f)
    picture = tmp_path / "loss.png"
    p = run("bench.py", f"--plot={picture}", f"--logs={tmp_path}/out/*/log.jsonl")
    assert p.returncode == 0 and "2 runs" in p.stdout, p.stderr
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000

def test_bench_refuses_what_it_cannot_do(tmp_path):
    cases = {("--what=speed",): ("speed", "kernels, train, sample, memory"),
             (f"--json={tmp_path}/none/rows.jsonl",): ("none/rows.jsonl", "No such file"),
             (f"--plot={tmp_path}/loss.png", f"--logs={tmp_path}/*.jsonl"): (str(tmp_path), "no such file")}
    for p, words in zip(two_at_a_time(lambda *flags: run("bench.py", *flags), cases), cases.values()):
        refused(p, *words)
