import torch
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
config = BambaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8,
    mamba_d_head=16, mamba_d_state=16, initializer_range=0.3)
model, ids, cache, logits = BambaForCausalLM(config).eval(), torch.randint(128, (1, 24)), None, []
for token in ids[0]:
    out = model(token.view(1, 1), cache=cache, use_cache=True)
    cache = out.cache
    logits.append(out.logits[0, 0])
for name, given in (("one call:", model(ids).logits[0]),
    ("token by token:", torch.stack(logits))):
    print(name, f"{given[:-1].log_softmax(-1)[range(23), ids[0, 1:]].mean():.4f}")
