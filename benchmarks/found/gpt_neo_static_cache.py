# GPT-Neo with a static cache: other logits, and other tokens from `generate`.
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM, StaticCache

torch.manual_seed(0)
shape = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2}
ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
config = GPTNeoConfig(vocab_size=64, hidden_size=32, window_size=8, **shape, **ends)
model = GPTNeoForCausalLM(config).eval()
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.5)
ids = torch.randint(1, 64, (1, 24))
with torch.no_grad():
    whole = model(ids).logits.log_softmax(-1)
    static = model(ids, cache=StaticCache(config, max_cache_len=40)).logits.log_softmax(-1)
print(f"{(static - whole).abs().max():.3g} nats")
