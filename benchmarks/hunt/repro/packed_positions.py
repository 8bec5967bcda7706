import torch
from transformers import AutoConfig, AutoModelForCausalLM

for name in ("qwen3_moe", "gpt_oss", "afmoe"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=128, hidden_size=64, intermediate_size=64,
        moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_local_experts=4,
        num_experts_per_tok=2, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    first, ids, positions = torch.randint(128, (1, 12)), torch.randint(128,
        (1, 24)), torch.cat([torch.arange(12), torch.arange(24)])[None]
    packed = model(torch.cat([first, ids], 1), position_ids=positions, use_cache=False).logits[0,
        12:]
    for how, given in (("alone", model(ids, use_cache=False).logits[0]), ("packed", packed)):
        print(f"{name} {how}:", f"{given[:-1].log_softmax(-1)[range(23), ids[0, 1:]].mean():.4f}")
