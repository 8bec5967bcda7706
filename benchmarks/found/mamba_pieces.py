# Mamba, FalconMamba and Jamba: the second piece of a sequence, after the cache of the first.
import torch
import transformers as t

ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
EXPERTS = {"num_experts": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
LAYERS = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
MODELS = {"Mamba": {"state_size": 8}, "FalconMamba": {"state_size": 8}}
MODELS |= {"Jamba": {**ATTENTION, **EXPERTS, **LAYERS, "use_mamba_kernels": False}}
found = []
for name, own in MODELS.items():
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, **own}
    config = getattr(t, f"{name}Config")(**shape, bos_token_id=0, eos_token_id=0)
    model = getattr(t, f"{name}ForCausalLM")(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    ids = torch.randint(1, 64, (1, 24))
    with torch.no_grad():
        whole = model(ids).logits[:, 12:].log_softmax(-1)
        cache = model(ids[:, :12], use_cache=True).cache
        second = model(ids[:, 12:], use_cache=True, cache=cache).logits.log_softmax(-1)
    found.append(float((second - whole).abs().max()))
print(f"{min(found):.3g} nats")
