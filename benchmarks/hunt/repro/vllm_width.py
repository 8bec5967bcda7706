import json
import os
import tempfile

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt

folder, ids = tempfile.mkdtemp(), list(range(1, 24))
torch.manual_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=128, initializer_range=0.2)
LlamaForCausalLM(config).save_pretrained(folder)
config.intermediate_size = 64  # the file says 64, the tensors have 96
config.save_pretrained(folder)
try:
    print("Transformers:", AutoModelForCausalLM.from_pretrained(folder))
except Exception as error:
    print("Transformers:", "refused,", type(error).__name__)
llm = LLM(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True)
(served,) = llm.generate(TokensPrompt(prompt_token_ids=ids),
    SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
print("vLLM:", "serves,",
    f"{sum(p[i].logprob for p, i in zip(served.prompt_logprobs[1:], ids[1:])) / 22:.4f}")
