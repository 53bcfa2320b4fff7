"""
Text from a trained model. The prompt is read in pieces by the chunked form, then tokens are drawn one at a time from
the recurrent state, whose size does not depend on how much it has read.

    python sample.py                                                    # the newest checkpoint under out/
    python sample.py --out_dir=out/gla_340m --prompt="The sea" --num_samples=3
    python sample.py --prompt=@story.txt --temperature=0                # the prompt from a file; always the likeliest
    python sample.py --prompt="The sea" --num_samples=64                # 64 continuations at once
    python sample.py --int8=True                                        # weights in half the memory

Samples of one prompt are drawn together, up to 64 at a time: the first is shown as it is drawn, the others when all
have ended. Several prompts are several runs. The text goes to stdout, speeds to stderr. Ctrl-C ends it.
"""
import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130)) # for the seconds in which torch is imported
    signal.signal(signal.SIGPIPE, signal.SIG_DFL) # `python sample.py | head` ends without a traceback

import codecs
import glob
import math
import re
import time
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

import config
from model import LM, ModelConfig, RMSNorm
from prepare import load_tokenizer
from train import brief, checkpoints, load_checkpoint

@dataclass(frozen=True)
class SampleConfig:
    out_dir: str = "" # folder of the checkpoints; empty: of the newest one under out/
    prompt: str = "" # @name reads it from a file
    num_samples: int = 1
    max_new_tokens: int = 256 # a sample ends earlier where the model ends the document
    temperature: float = 0.8 # 0: always the likeliest token
    top_k: int = 200 # draw from the k likeliest tokens, 0: from all
    top_p: float = 1.0 # draw from the likeliest tokens that make up this share of the probability
    seed: int = 1337 # the same samples on the same device, if num_samples is the same
    int8: bool = False # weights in 8 bits: half the memory of bf16, no faster

# tokens of a prompt read at once, multiples of the chunk of 64: the pieces then give the state of one pass. On a GPU as
# many as hide the launches: about 1 GB for a 340M model
PIECE = {"cpu": 4096, "cuda": 32_768}
BATCH = 64 # samples drawn at once

# ----------------------------------------------------------------------------------------------------------------------
# checkpoint and prompt

def newest_out_dir():
    """The folder under out/ whose checkpoint was written last."""
    paths = [path for folder in glob.glob("out/**/", recursive=True) for path in checkpoints(folder)]
    return os.path.dirname(max(paths, key=os.path.getmtime)) if paths else "out"

def load_model(checkpoint, path, device, int8):
    try:
        model = LM(ModelConfig(**{f.name: checkpoint["config"][f.name] for f in fields(ModelConfig)}))
        model.load_state_dict(checkpoint["model"])
    except (KeyError, RuntimeError) as error:
        sys.exit(f"{path} does not fit this model.py: {brief(error)}")
    return for_inference(model, device, int8)

class Int8(nn.Module):
    """A linear layer or an embedding whose matrix is kept as int8 with a scale per row; `weight` makes it anew."""
    def __init__(self, module, dtype):
        super().__init__()
        self.dtype, self.lookup = dtype, isinstance(module, nn.Embedding)
        scale = module.weight.abs().amax(1).clamp(min=1e-30) / 127
        self.register_buffer("scale", scale) # fp32
        self.register_buffer("q", (module.weight / scale[:, None]).round().to(torch.int8))

    @property
    def weight(self):
        return (self.q * self.scale[:, None]).to(self.dtype)

    def forward(self, x):
        if self.lookup:
            return (self.q[x] * self.scale[x][..., None]).to(self.dtype)
        return F.linear(x, self.weight)

class FusedRMSNorm(RMSNorm):
    def forward(self, x, gate=None):
        import kernels
        return kernels.rms_norm(x, self.weight, self.eps, gate)

def fold(norm, *readers):
    """The norm's gain put into the matrices that read it, W (gain x) = (W diag(gain)) x; the norm keeps ones."""
    for linear in readers:
        linear.weight.mul_(norm.weight.repeat(linear.in_features // len(norm.weight))) # a head's norm, once a head
    norm.weight.fill_(1)

def for_inference(model, device, int8=False):
    """
    The model on its device; on a GPU its matrices are bf16. With int8 they are in 8 bits, but for decay_proj and
    ab_proj, 0.1% of them: errors of the decay compound. A_log, dt_bias, norms and convolutions stay fp32. The gains of
    the blocks' norms are in the matrices.
    """
    model.to(device).eval().requires_grad_(False)
    for block in model.blocks:
        mixer, mlp = block.mixer, block.mlp
        readers = [m for name, m in mixer.named_children() if name in ("in_proj", "ab_proj", "gate_proj")]
        fold(block.mixer_norm, *readers)
        fold(block.mlp_norm, mlp.gate_proj, mlp.value_proj)
        if model.cfg.mixer != "attention":
            fold(mixer.norm, mixer.out_proj)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for name, module in list(model.named_modules()):
        if isinstance(module, RMSNorm) and device == "cuda":
            module.__class__ = FusedRMSNorm
        if isinstance(module, (nn.Linear, nn.Embedding)):
            if int8 and not name.endswith(("decay_proj", "ab_proj")):
                parent, _, name = name.rpartition(".")
                setattr(model.get_submodule(parent), name, Int8(module, dtype))
            else:
                module.to(dtype)
    return model

def weight_bytes(model):
    return sum(x.numel() * x.element_size() for x in model.state_dict().values())

def read_prompt(prompt):
    text = prompt
    try:
        if prompt.startswith("@"):
            with open(prompt[1:], encoding="utf-8", newline="") as f:
                text = f.read()
    except OSError as error:
        sys.exit(f"--prompt={prompt}: cannot read the file: {error.strerror}")
    except UnicodeDecodeError as error:
        sys.exit(f"--prompt={prompt}: the file is not UTF-8 text at byte {error.start}")
    if re.search(r"\s{900000}", text): # near 10^6, tiktoken's regular expression gives up
        sys.exit("the prompt has 900,000 white-space characters in a row: shorten the run")
    return text

# ----------------------------------------------------------------------------------------------------------------------
# from tokens to tokens

@torch.no_grad()
def prefill(model, tokens, piece=None):
    """Reads tokens (B, T), any T >= 1. Returns the state after them and the logits (B, vocab_size) of the next."""
    state = model.init_state(len(tokens))
    for part in tokens.split(piece or PIECE[tokens.device.type], 1):
        x = model.hidden(part, state=state)
    return state, F.linear(x[:, -1], model.embed.weight)

def choose(logits, temperature, top_k, top_p):
    """
    A token for each row of logits (B, N), as (B, 1): the likeliest if temperature is 0, else drawn from
    softmax(logits / temperature) cut to the top_k likeliest, and those to the fewest that hold top_p of what is left.
    """
    if temperature < 1e-6: # so cold that only the largest is left
        return logits.argmax(-1, keepdim=True)
    ids = None
    if 0 < top_k < logits.shape[-1] or top_p < 1:
        logits, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]), sorted=top_p < 1) # falling
    if top_p < 1:
        p = (logits.float() / temperature).softmax(-1)
        logits = logits.masked_fill(p.cumsum(-1) - p >= top_p, -math.inf) # what comes before a token holds top_p
    # argmax p/e with e exponentially distributed draws from p, and needs no word from the host. The same with its
    # logarithm times temperature, logits - temperature log e, needs no softmax either
    e = torch.empty_like(logits, dtype=torch.float32).exponential_().clamp_(min=1e-30)
    choice = torch.sub(logits, e.log_(), alpha=min(temperature, 1e30)).argmax(-1, keepdim=True) # finite in fp32
    return choice if ids is None else ids.gather(-1, choice)

class Decoder:
    """
    B sequences, a token at a time: `token` (B, 1) holds their newest tokens, `state` all that came before, and step()
    puts the next ones into `token`. On a GPU a step, drawing included, is one CUDA graph, whose addresses are fixed:
    attention keeps memory for `room` tokens, prompt included, and looks at all of it.
    """
    def __init__(self, model, batch, n_vocab, temperature, top_k, top_p, room):
        self.model, self.n_vocab, self.how = model, n_vocab, (temperature, top_k, top_p)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=model.norm.weight.device)
        self.state, self.graph = model.init_state(batch), None
        if self.token.is_cuda:
            if model.cfg.mixer == "attention":
                room = max(16, -room // 16 * -16) # SDPA copies masks of other sizes
                self.state = [block.mixer.fixed_state(batch, room, torch.bfloat16, "cuda") for block in model.blocks]
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()): # a graph must not be the first to run a kernel
                for _ in range(3):
                    self.forward()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.forward()

    @torch.no_grad()
    def forward(self):
        if self.token.is_cuda:
            self.draw(self.model.step(self.token[:, 0], self.state))
        else:
            self.draw(self.model(self.token, state=self.state)[0][:, -1])

    def draw(self, logits):
        self.token.copy_(choose(logits[:, :self.n_vocab], *self.how)) # rows beyond n_vocab only pad the embedding

    def start(self, state, logits):
        """Each row goes on from prefill's results, of as many rows or of one, which stay as they are; draws a token."""
        batch = len(self.token)
        for mine, given in zip(self.state, state):
            for name, x in given.items():
                if self.graph is None:
                    mine[name] = x.expand(batch, *x.shape[1:]).clone() if torch.is_tensor(x) else x
                elif name == "length":
                    mine[name].fill_(x)
                elif name in ("k", "v"):
                    mine[name][:, :, :given["length"]] = x[:, :, :given["length"]]
                else:
                    mine[name].copy_(x)
        self.draw(logits.expand(batch, -1))

    def step(self):
        self.forward() if self.graph is None else self.graph.replay()

def generate(decoder, state, logits, max_new_tokens, eot):
    """Yields the tokens that follow a prefill, a list of one a row: None in a row that has met eot, until all have."""
    decoder.start(state, logits)
    ended = set()
    for i in range(max_new_tokens):
        if i > 0:
            decoder.step()
        tokens = decoder.token[:, 0].tolist()
        ended |= {row for row, token in enumerate(tokens) if token == eot}
        if len(ended) == len(tokens):
            return
        yield [None if row in ended else token for row, token in enumerate(tokens)]

def state_bytes(state):
    return sum(x.numel() * x.element_size() for layer in state for x in layer.values() if torch.is_tensor(x))

# ----------------------------------------------------------------------------------------------------------------------

def check(cfg):
    for ok, sentence in (
            (cfg.num_samples >= 1, f"--num_samples={cfg.num_samples}: at least 1"),
            (cfg.max_new_tokens >= 1, f"--max_new_tokens={cfg.max_new_tokens}: at least 1"),
            (0 <= cfg.temperature < float("inf"), f"--temperature={cfg.temperature}: 0 or more"),
            (cfg.top_k >= 0, f"--top_k={cfg.top_k}: 0 (all tokens) or more"),
            (0 < cfg.top_p <= 1, f"--top_p={cfg.top_p}: above 0, at most 1"),
            (0 <= cfg.seed < 2**63, f"--seed={cfg.seed}: 0 or more, below 2^63")):
        if not ok:
            sys.exit(sentence)

def say(*words):
    print(*words, file=sys.stderr, flush=True) # stdout is for the text

def main():
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    cfg = config.load(SampleConfig)
    check(cfg)
    text = read_prompt(cfg.prompt)
    out_dir = cfg.out_dir or newest_out_dir()
    checkpoint, path = load_checkpoint(out_dir, say)
    if checkpoint is None:
        sys.exit(f"{out_dir}/ holds no checkpoint (ckpt_*.pt): train one first, python train.py config/tiny.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(checkpoint, path, device, cfg.int8), load_tokenizer(checkpoint["tokenizer"])
    tokens = [tokenizer.eot_token, *tokenizer.encode_ordinary(text)] # as every document of the training data starts
    n_params = sum(x.numel() for x in checkpoint["model"].values())
    size = f"{n_params:,} parameters in {weight_bytes(model) / 1e6:,.1f} MB"
    say(f"{path}: {model.cfg.mixer}, {size}, on {device}")

    start = time.perf_counter()
    state, logits = prefill(model, torch.tensor([tokens], device=device))
    logits.max().item() # waits for the GPU
    speed = len(tokens) / (time.perf_counter() - start)
    say(f"prompt: {len(tokens):,} tokens read at {speed:,.0f} tok/s")

    batch = math.ceil(cfg.num_samples / math.ceil(cfg.num_samples / BATCH))
    how = cfg.temperature, cfg.top_k, cfg.top_p
    decoder = Decoder(model, batch, tokenizer.n_vocab, *how, room=len(tokens) + cfg.max_new_tokens)
    torch.manual_seed(cfg.seed)
    sys.stdout.reconfigure(errors="replace") # for a terminal that lacks a character
    shown, drawn, start = "" if cfg.prompt.startswith("@") else text, 0, time.perf_counter()
    try:
        for first in range(0, cfg.num_samples, batch):
            print(("-" * 80 + "\n" if first > 0 else "") + shown, end="", flush=True)
            utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace") # a character may span several tokens
            texts = [b""] * min(batch, cfg.num_samples - first)
            for row_tokens in generate(decoder, state, logits, cfg.max_new_tokens, tokenizer.eot_token):
                for row, token in enumerate(row_tokens[:len(texts)]):
                    if token is not None:
                        drawn += 1
                        piece = tokenizer.decode_single_token_bytes(token)
                        texts[row] += piece
                        if row == 0: # shown as it comes
                            print(utf8.decode(piece), end="", flush=True)
            print(utf8.decode(b"", final=True), flush=True)
            for other in texts[1:]:
                print("-" * 80 + "\n" + shown + other.decode(errors="replace"), flush=True)
    finally: # also after Ctrl-C
        speed, size = drawn / (time.perf_counter() - start), state_bytes(decoder.state) / batch
        say(f"\nsamples: {drawn:,} tokens drawn at {speed:,.0f} tok/s, state {size / 1e6:,.3f} MB a sample")

if __name__ == "__main__":
    main()
