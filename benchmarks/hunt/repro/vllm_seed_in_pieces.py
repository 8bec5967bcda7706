import os
import tempfile

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt

folder, ids = tempfile.mkdtemp(), list(range(1, 65))
torch.manual_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=128)
LlamaForCausalLM(config).save_pretrained(folder)
llm = LLM(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
    max_num_batched_tokens=32)
for seed in (None, 7):
    try:
        (out,) = llm.generate(TokensPrompt(prompt_token_ids=ids),
            SamplingParams(max_tokens=4, seed=seed, detokenize=False), use_tqdm=False)
        print(f"seed {seed}:", f"{len(out.outputs[0].token_ids)} tokens")
    except Exception as error:
        print(f"seed {seed}:", type(error).__name__)
