# Falcon with ALiBi: eager attention against SDPA.
import torch
from transformers import FalconConfig, FalconForCausalLM

torch.manual_seed(0)
shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "multi_query": False}
config = {"vocab_size": 64, "hidden_size": 32, "alibi": True, **shape}
eager = FalconForCausalLM(FalconConfig(**config, attn_implementation="eager")).eval()
for weight in eager.parameters():
    torch.nn.init.normal_(weight, std=0.5)
sdpa = FalconForCausalLM(FalconConfig(**config, attn_implementation="sdpa")).eval()
sdpa.load_state_dict(eager.state_dict())
ids = torch.randint(1, 64, (1, 24))
with torch.no_grad():
    a, b = (model(ids).logits.log_softmax(-1) for model in (eager, sdpa))
print(f"{(a - b).abs().max():.3g} nats")
