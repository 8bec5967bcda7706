import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

torch.manual_seed(0)
config = Mamba2Config(vocab_size=128, hidden_size=64, num_heads=8, head_dim=16, state_size=16,
    n_groups=1, chunk_size=16, num_hidden_layers=2, initializer_range=0.3)
model, ids = Mamba2ForCausalLM(config).eval(), torch.randint(1, 128, (1, 6))
turn = model.generate(ids, do_sample=False, max_new_tokens=2, eos_token_id=None, pad_token_id=0,
    return_dict_in_generate=True)
both = torch.cat([turn.sequences, ids[:, :2]], 1)
for name, cache in (("without a cache:", None),
    ("with the cache of the first turn:", turn.cache)):
    out = model.generate(both, cache=cache, do_sample=False, max_new_tokens=1, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    print(name, f"{out.logits[0][0].log_softmax(-1)[1]:.4f}")
