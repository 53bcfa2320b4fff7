# A Gated DeltaNet of 0.9M parameters on the Python standard library as bytes: two minutes on 2 CPU cores
# python prepare.py && python train.py config/tiny.py
mixer = "gdn"
n_layer, n_head, n_embd = 2, 2, 192
d_key, d_value = 48, 96 # per head: keys half the model's width, values all of it
conv_size = 4 # tokens, of the short convolutions on q, k and v
d_mlp = 512
vocab_size = 264 # 256 bytes and the end-of-text token, rounded up to a multiple of 8

data_dir = "data/stdlib-bytes"
out_dir = "out/tiny"
seq_len = 256 # tokens
batch_size = 8 # rows per micro-step
batch_tokens = 2048 # 8 rows * 256 tokens * 1 micro-step
total_tokens = 819_200 # 400 steps
warmup_tokens = 40_960 # 20 steps
learning_rate, muon_lr, min_lr = 4e-3, 4e-3, 0.0
schedule, decay_frac = "wsd", 0.3
zero_out = True
eval_interval = 100 # steps
eval_tokens = 65_536 # 256 rows, taken evenly over the validation set
save_interval = 100 # steps
compile = False # a CPU without a C++ compiler will do
