# Gated DeltaNet 340M on 15B tokens of SlimPajama: 341.1M parameters, one node of 8 GPUs
# torchrun --standalone --nproc_per_node=8 train.py config/gdn_340m.py
mixer = "gdn"
n_layer, n_head, n_embd = 21, 6, 1024
d_key, d_value = 128, 256 # per head: keys 3/4 of the model's width, values 3/2
conv_size = 4 # tokens, of the short convolutions on q, k and v
d_mlp = 2432
expect_params = 340_000_000

data_dir = "data/slimpajama-gpt2"
out_dir = "out/gdn_340m"
seq_len = 2048 # tokens
batch_size = 32 # rows per GPU per micro-step
batch_tokens = 524_288 # 32 rows * 2048 tokens * 8 GPUs * 1 micro-step; one GPU takes 8 micro-steps
total_tokens = 15_000_000_000 # 28,610 steps
warmup_tokens = 500_000_000 # 953 steps
# the best, as far as seeds tell, of 21 trials on models of 36M parameters and 29M tokens (README)
learning_rate, muon_lr, min_lr = 4e-3, 2e-3, 0.0
schedule, decay_frac = "wsd", 0.3
zero_out = True
