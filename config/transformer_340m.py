# A Transformer on 15B tokens of SlimPajama, the baseline (softmax attention, rotary positions): 341.0M parameters, one
# node of 8 GPUs
# torchrun --standalone --nproc_per_node=8 train.py config/transformer_340m.py
mixer = "attention"
n_layer, n_head, n_embd = 24, 16, 1024
d_key, d_value = 64, 64 # per head: 16 of them make the model's width
reset_at_eot = False # it attends over the whole row, documents before included
d_mlp = 2560
expect_params = 340_000_000

data_dir = "data/slimpajama-gpt2"
out_dir = "out/transformer_340m"
seq_len = 2048 # tokens
batch_size = 32 # rows per GPU per micro-step
batch_tokens = 524_288 # 32 rows * 2048 tokens * 8 GPUs * 1 micro-step; one GPU takes 8 micro-steps
total_tokens = 15_000_000_000 # 28,610 steps
warmup_tokens = 500_000_000 # 953 steps
# as in gla_340m.py: run for 180 steps (README), nothing else was tried on a Transformer
learning_rate, muon_lr, min_lr = 4e-3, 2e-3, 0.0
schedule, decay_frac = "wsd", 0.3
zero_out = True
