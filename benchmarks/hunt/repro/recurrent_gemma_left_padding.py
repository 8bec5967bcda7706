import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.manual_seed(0)
config = RecurrentGemmaConfig(vocab_size=128, hidden_size=64, lru_width=64, intermediate_size=96,
    num_hidden_layers=3, num_attention_heads=4, head_dim=16, attention_window_size=32)
model, ids = RecurrentGemmaForCausalLM(config).eval(), torch.randint(1, 128, (1, 12))
for weight in model.parameters():
    weight.data.add_(0.3 * torch.randn(weight.shape))
padded = torch.cat([torch.zeros(1, 12, dtype=torch.long), ids], 1)
for name, given in (("alone:", ids), ("left-padded:", padded)):
    out = model.generate(given, attention_mask=(given > 0).long(), do_sample=False,
        max_new_tokens=1, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
        output_logits=True)
    print(name, f"{out.logits[0][0].log_softmax(-1)[1]:.4f}")
