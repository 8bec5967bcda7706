# Bamba: a token after a cache, without position_ids, against the whole sequence.
import torch
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_indices": [1]}
mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
config = BambaConfig(vocab_size=64, **shape, **attention, **mamba)
model = BambaForCausalLM(config).eval()
for weight in model.parameters():
    if weight.ndim > 1:
        torch.nn.init.normal_(weight, std=0.3)
ids = torch.randint(1, 64, (1, 24))
with torch.no_grad():
    whole = model(ids).logits[:, -1].log_softmax(-1)
    cache = model(ids[:, :-1], use_cache=True).cache
    last = model(ids[:, -1:], cache=cache).logits[:, -1].log_softmax(-1)
print(f"{(last - whole).abs().max():.3g} nats")
