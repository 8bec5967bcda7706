# GPT-OSS and AFMoE: two sequences packed in one row, with positions that begin again.
import torch
import transformers as t

SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8}
MODELS = {"GptOss": {"num_local_experts": 2}, "Afmoe": {"num_experts": 2, "num_dense_layers": 1}}
MODELS["Afmoe"] |= {"moe_intermediate_size": 32}
found = []
for name, own in MODELS.items():
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "num_experts_per_tok": 1, **SHAPE, **HEADS, **own}
    config = getattr(t, f"{name}Config")(**shape, attn_implementation="eager")
    model = getattr(t, f"{name}ForCausalLM")(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    first, ids = torch.randint(1, 64, (1, 16)), torch.randint(1, 64, (1, 24))
    row, at = torch.cat([first, ids], 1), torch.cat([torch.arange(16), torch.arange(24)])[None]
    with torch.no_grad():
        alone = model(ids, use_cache=False).logits.log_softmax(-1)
        packed = model(row, position_ids=at, use_cache=False).logits[:, 16:].log_softmax(-1)
    found.append(float((packed - alone).abs().max()))
print(f"{min(found):.3g} nats")
