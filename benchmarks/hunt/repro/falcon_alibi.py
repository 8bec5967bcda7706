import torch
from transformers import FalconConfig, FalconForCausalLM

for attention in ("eager", "sdpa"):
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, alibi=True, multi_query=False, initializer_range=0.3)
    model = FalconForCausalLM._from_config(config, attn_implementation=attention).eval()
    ids = torch.randint(128, (1, 96), generator=torch.Generator().manual_seed(0))
    logp = model(ids).logits[0, :-1].log_softmax(-1)
    print(f"{attention}:", f"{logp[-1, ids[0, -1]]:.4f}")
