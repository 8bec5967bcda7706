import torch
from transformers import JambaConfig, JambaForCausalLM

torch.manual_seed(0)
config = JambaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, num_experts=2, attn_layer_period=4,
    attn_layer_offset=3, initializer_range=0.3)
model, ids = JambaForCausalLM(config).eval(), torch.randint(1, 128, (1, 24))
for size in (None, 8):
    out = model.generate(ids, do_sample=False, max_new_tokens=12, prefill_chunk_size=size,
        eos_token_id=None, pad_token_id=0)
    print(f"prefill_chunk_size={size}:", out[0, 24:].tolist())
