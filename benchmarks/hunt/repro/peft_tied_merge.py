import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, tie_word_embeddings=True, initializer_range=0.1)
lora = LoraConfig(r=4, target_modules=["embed_tokens"], ensure_weight_tying=True)
model, ids = get_peft_model(LlamaForCausalLM(config), lora).eval(), torch.randint(128, (1, 24))
for name, weight in model.named_parameters():
    weight.data.add_(0.1 * torch.randn(weight.shape) * ("lora_" in name))
for name, served in (("adapter:", model), ("merged:", model.merge_and_unload)):
    logits = (served if served is model else served())(ids).logits[0, :-1]
    print(name, f"{logits.log_softmax(-1)[range(23), ids[0, 1:]].mean():.4f}")
