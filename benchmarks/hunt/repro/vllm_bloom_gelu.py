import os
import tempfile

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
import torch
from transformers import BloomConfig, BloomForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt

folder, ids = tempfile.mkdtemp(), list(range(1, 24))
torch.manual_seed(0)
model = BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=64, n_layer=4, n_head=2,
    initializer_range=0.3)).eval()
model.save_pretrained(folder)


def mean():
    logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return f"{sum(logp[i, token] for i, token in enumerate(ids[1:])) / 22:.4f}"


print("Transformers:", mean())
llm = LLM(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True)
(served,) = llm.generate(TokensPrompt(prompt_token_ids=ids),
    SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
print("vLLM:", f"{sum(p[i].logprob for p, i in zip(served.prompt_logprobs[1:], ids[1:])) / 22:.4f}")
for block in model.transformer.h:
    block.mlp.gelu_impl.forward = torch.nn.functional.gelu
print("Transformers with the exact GELU:", mean())
