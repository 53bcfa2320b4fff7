# GLA 340M on 15B tokens of SlimPajama: 341.6M parameters, one node of 8 GPUs
# torchrun --standalone --nproc_per_node=8 train.py config/gla_340m.py
mixer = "gla"
n_layer, n_head, n_embd = 24, 4, 1024
d_key, d_value = 128, 256 # per head: keys half the model's width, values all of it
d_mlp = 2560
expect_params = 340_000_000

data_dir = "data/slimpajama-gpt2"
out_dir = "out/gla_340m"
seq_len = 2048 # tokens
batch_size = 32 # rows per GPU per micro-step
batch_tokens = 524_288 # 32 rows * 2048 tokens * 8 GPUs * 1 micro-step; one GPU takes 8 micro-steps
total_tokens = 15_000_000_000 # 28,610 steps
warmup_tokens = 500_000_000 # 953 steps
# the best, as far as seeds tell, of 23 trials on models of 36M parameters and 29M tokens (README)
learning_rate, muon_lr, min_lr = 4e-3, 2e-3, 0.0
schedule, decay_frac = "wsd", 0.3
zero_out = True
