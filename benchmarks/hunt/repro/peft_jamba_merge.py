import torch
from peft import LoraConfig, get_peft_model
from transformers import JambaConfig, JambaForCausalLM

torch.manual_seed(0)
config = JambaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_experts=2, attn_layer_period=2,
    attn_layer_offset=1, initializer_range=0.3)
lora = LoraConfig(r=4, target_modules=["dt_proj"], init_lora_weights=False)
base, ids = JambaForCausalLM(config).eval(), torch.randint(128, (1, 24))
def score(model):
    logp = model(ids).logits[0, :-1].log_softmax(-1)
    return f"{logp[range(23), ids[0, 1:]].mean():.4f}"
print("base model:", score(base))
model = get_peft_model(base, lora).eval()
print("adapter:", score(model))
print("merged:", score(model.merge_and_unload()))
