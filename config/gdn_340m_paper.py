# Gated DeltaNet 340M by the recipe of the papers (arXiv:2312.06635, 2412.06464), to compare ours with
# torchrun --standalone --nproc_per_node=8 train.py config/gdn_340m_paper.py
from config.gdn_340m import * # the same model, data, 0.5M tokens a step, 15B tokens and warm-up over 0.5B

out_dir = "out/gdn_340m_paper"
schedule = "cosine"
learning_rate, muon_lr, min_lr = 3e-4, 0.0, 3e-5 # AdamW alone
zero_out = False
weight_decay = 0.01
grad_clip = 1.0
