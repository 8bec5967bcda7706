import tempfile
import torch
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
config = RwkvConfig(vocab_size=128, hidden_size=64, num_hidden_layers=8, rescale_every=2)
model, ids, folder = RwkvForCausalLM(config).eval(), torch.randint(128,
    (1, 24)), tempfile.mkdtemp()
before = model(ids).logits[0, :-1].log_softmax(-1)
model.save_pretrained(folder)
after = RwkvForCausalLM.from_pretrained(folder).eval()(ids).logits[0, :-1].log_softmax(-1)
for name, logp in (("before save_pretrained:", before), ("loaded again:", after)):
    print(name, f"{logp[range(23), ids[0, 1:]].mean():.4f}")
