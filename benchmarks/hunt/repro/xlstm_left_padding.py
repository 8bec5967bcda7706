import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

torch.manual_seed(0)
config = xLSTMConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_blocks=2,
    num_heads=4, qk_dim_factor=1.0, chunk_size=16, pad_token_id=0)
model, ids = xLSTMForCausalLM(config).eval(), torch.randint(1, 128, (1, 12))
padded = torch.cat([torch.zeros(1, 12, dtype=torch.long), ids], 1)
for name, given in (("alone:", ids), ("left-padded:", padded)):
    out = model.generate(given, attention_mask=(given > 0).long(), do_sample=False,
        max_new_tokens=8, eos_token_id=None)
    print(name, out[0, -8:].tolist())
