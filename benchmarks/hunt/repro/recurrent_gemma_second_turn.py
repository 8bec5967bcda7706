import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.manual_seed(0)
config = RecurrentGemmaConfig(vocab_size=128, hidden_size=64, lru_width=64, intermediate_size=96,
    num_hidden_layers=3, num_attention_heads=4, head_dim=16, attention_window_size=32)
model, ids = RecurrentGemmaForCausalLM(config).eval(), torch.randint(1, 128, (1, 12))
for weight in model.parameters():
    weight.data.add_(0.3 * torch.randn(weight.shape))
options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
turn = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, **options)
both = torch.cat([turn.sequences, ids[:, :2]], 1)
for name, cache in (("with the cache of the first turn:", turn.cache), ("without a cache:", None)):
    out = model.generate(both, cache=cache, max_new_tokens=1, return_dict_in_generate=True,
        output_logits=True, **options)
    print(name, f"{out.logits[0][0].log_softmax(-1)[1]:.4f}")
