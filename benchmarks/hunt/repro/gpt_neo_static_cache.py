import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

torch.manual_seed(0)
config = GPTNeoConfig(vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, window_size=8,
    max_position_embeddings=64, attention_types=[[["global", "local"], 1]], initializer_range=0.3,
    bos_token_id=0, eos_token_id=0)
model, ids = GPTNeoForCausalLM(config).eval(), torch.randint(1, 128, (1, 12))
for cache in ("dynamic", "static"):
    out = model.generate(ids, do_sample=False, max_new_tokens=8, cache_implementation=cache,
        eos_token_id=None, pad_token_id=0)
    print(f"{cache}:", out[0, 12:].tolist())
