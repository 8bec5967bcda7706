import os
import tempfile

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory

folder, ids = tempfile.mkdtemp(), list(range(1, 24))
torch.manual_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=128, initializer_range=0.2)
LlamaForCausalLM(config).save_pretrained(folder)
for scheme in (None, "int8_per_channel_weight_only"):
    llm = LLM(folder, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True,
        quantization=scheme)
    (served,) = llm.generate(TokensPrompt(prompt_token_ids=ids),
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
    print(f"quantization={scheme}:",
        f"{sum(p[i].logprob for p, i in zip(served.prompt_logprobs[1:], ids[1:])) / 22:.9f}")
    del llm
    cleanup_dist_env_and_memory()
