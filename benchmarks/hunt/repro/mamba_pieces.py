import torch
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
config = MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, initializer_range=0.3)
model, ids = MambaForCausalLM(config).eval(), torch.randint(128, (1, 24))
first = model(ids[:, :12], use_cache=True)
second = model(ids[:, 12:], cache=first.cache, use_cache=True)
for name, given in (("one call:", model(ids).logits[0, 12:]), ("two calls:", second.logits[0])):
    print(name, f"{given[:-1].log_softmax(-1)[range(11), ids[0, 13:]].mean():.4f}")
