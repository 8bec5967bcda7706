import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

torch.manual_seed(0)
config = MiniMaxConfig(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=2, block_size=16,
    initializer_range=0.3)
model, ids = MiniMaxForCausalLM(config).eval(), torch.randint(1, 128, (1, 12))
for cache in (False, True):
    out = model.generate(ids, num_beams=3, do_sample=False, use_cache=cache, max_new_tokens=8,
        eos_token_id=None, pad_token_id=0)
    print(f"use_cache={cache}:", out[0, 12:].tolist())
