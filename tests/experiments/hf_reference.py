"""What PyTorch and transformers make of tiny models: run by `hf_fixtures`, in their environment.

    python hf_reference.py make OUT        # a folder, an .npz and a .v4.json of each family
    python hf_reference.py load FOLDER...  # logits of other people's folders
    python hf_reference.py chat OUT        # chats as ids

Nothing here knows jaxaccel, and nothing is downloaded. It runs under Python 3.11 too.
"""

import copy
import json
import pathlib
import re
import sys

import numpy as np
import torch
import transformers

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,  # large, so that it is seen
}
LLAMA2 = {"model_type": "llama", "num_key_value_heads": 4}
# Of its four frequencies one is left as it is, one is in between, two are divided by the factor.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
ROPE_1M = {"rope_type": "default", "rope_theta": 1e6}
# A key's bias at a frequency near zero has a gradient of rounding alone, which AdamW scales up.
ROPE_500 = {"rope_type": "default", "rope_theta": 500.0}
GEMMA2 = {
    "model_type": "gemma2",
    "sliding_window": 7,  # of the first layer; the second sees all
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 2.0,
}

# family: a seed with which greedy decoding has no near ties, and what it changes in SHAPE.
FAMILIES = {
    "llama2": (4, LLAMA2),
    "llama3": (4, {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE}),
    "mistral": (5, {"model_type": "mistral", "sliding_window": 7}),
    "qwen2": (3, {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": ROPE_500}),
    "qwen3": (3, {"model_type": "qwen3", "head_dim": 12, "rope_parameters": ROPE_1M}),
    "gemma2": (0, GEMMA2),
    "llama_tied": (1, {"model_type": "llama", "tie_word_embeddings": True}),
    "llama_bf16": (4, LLAMA2),
}
SAVED = {
    "llama_tied": {"max_shard_size": "12KB"},
    "llama_bf16": {"dtype": torch.bfloat16},
}

BATCH, LENGTH, PROMPT, GREEDY, STEPS, TRAIN_BATCH = 2, 24, 8, 64, 10, 4
LEAST_GAP = 1e-3  # between the two largest logits: far more than float32 can differ by
LOADING = ("missing", "unexpected", "mismatched")
SPECIAL = 3  # ids below are padding, begin and end; torch gives a padding id no gradient


def make(out):
    """Writes each family's OUT/<family>/, OUT/<family>.npz and OUT/<family>.v4.json."""
    for family, (seed, changes) in FAMILIES.items():
        config = transformers.AutoConfig.for_model(**SHAPE | changes)
        torch.manual_seed(seed)
        model = random_model(config)
        folder = out / family
        save(model, folder, **SAVED.get(family, {}))
        write_version_4(folder / "config.json", out / f"{family}.v4.json")
        model, _ = load_model(folder)  # what is in the files, rounding included
        tokens = random_tokens(BATCH, LENGTH)
        check_window(model, tokens, getattr(config, "sliding_window", None) or LENGTH)
        train_tokens = random_tokens(STEPS, TRAIN_BATCH, LENGTH)
        np.savez(
            out / f"{family}.npz",
            tokens=tokens.numpy().astype(np.int32),
            train_tokens=train_tokens.numpy().astype(np.int32),
            greedy=greedy(family, model, tokens[0, :PROMPT]),
            losses=trained_losses(copy.deepcopy(model), train_tokens),
            **gradients(model, tokens),
        )


def random_model(config):
    """A model whose every parameter matters: no zero biases, no norms of one."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # Gemma 2 scales its embeddings up: it would only repeat tokens, if its layers did no more.
    norms, embeddings = (1.0, 0.5) if config.model_type == "gemma2" else (0.0, 1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases, around what they start with
                parameter += norms + 0.3 * torch.randn_like(parameter)
            else:
                gain = embeddings if "embed" in name or "lm_head" in name else 2.0
                parameter.normal_(std=gain / parameter.shape[1] ** 0.5)
    return model


def random_tokens(*shape):
    return torch.randint(SPECIAL, SHAPE["vocab_size"], shape)


def save(model, folder, dtype=torch.float32, **options):
    model.to(dtype).save_pretrained(folder, **options)
    files = list(folder.glob("*.safetensors"))
    assert (len(files) > 2) == ("max_shard_size" in options), files


def write_version_4(path, target):
    """The same configuration with the keys that released models carry."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.40.0"
    config.pop("layer_types", None)
    if config["rope_theta"] == 1e4 and config["model_type"] == "llama":
        del config["rope_theta"]  # Llama 2 has none
    if config["model_type"] in ("llama", "mistral", "qwen2"):  # width / heads went without saying
        del config["head_dim"]
    if config["model_type"] in ("qwen2", "qwen3"):  # there, and not in use
        config["sliding_window"] = 5
    target.write_text(json.dumps(config, indent=2, sort_keys=True))
    kind = transformers.AutoConfig.for_model(config["model_type"]).__class__
    new, old = (
        {k: v for k, v in kind.from_json_file(file).to_dict().items() if "version" not in k}
        for file in (path, target)
    )
    assert new.pop("head_dim", 8) == (old.pop("head_dim", None) or 8)
    assert new == old, {k: (new.get(k), old.get(k)) for k in new | old if new.get(k) != old.get(k)}


def load_model(folder):
    """The folder's model in float32, and what transformers says of its tensors."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )


@torch.no_grad()
def check_window(model, tokens, window):
    """The first layer sees the first token at the first `window` places, and at no other."""
    other = tokens.clone()
    other[:, 0] = SPECIAL + (tokens[:, 0] - SPECIAL + 1) % (SHAPE["vocab_size"] - SPECIAL)
    one, two = (model(t, output_hidden_states=True).hidden_states[1] for t in (tokens, other))
    seen = (one != two).any(dim=-1)
    assert seen[:, :window].all() and not seen[:, window:].any(), seen


def next_token_loss(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model, tokens):
    """Logits, loss, and the loss' gradient by each parameter; one that is tied comes once."""
    logits = model(tokens).logits
    assert 0.5 < logits.std() < 2, logits.std()
    loss = next_token_loss(logits, tokens)
    loss.backward()
    result = {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
    for name, parameter in model.named_parameters():
        result[f"grad/{name}"] = parameter.grad.numpy()
    return result


@torch.no_grad()
def greedy(family, model, tokens):
    """The tokens that decoding appends, each the argmax by a clear margin."""
    gaps = []
    for _ in range(GREEDY):
        best = model(tokens[None], use_cache=False).logits[0, -1].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        tokens = torch.cat([tokens, best.indices[:1]])
    appended = tokens[-GREEDY:].numpy().astype(np.int32)
    assert min(gaps) > LEAST_GAP, f"{family}: another seed, please: least gap {min(gaps):.1e}"
    assert len(set(appended)) > 8, f"{family}: another seed, please: it repeats {set(appended)}"
    return appended


def trained_losses(model, batches):
    """The loss of each batch before the step on it."""
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens).logits, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def load(*folders):
    """Writes FOLDER/logits.npy, of FOLDER/tokens.npy, and FOLDER/loading.json."""
    for folder in folders:
        model, loading = load_model(folder)
        with torch.no_grad():
            logits = model(torch.from_numpy(np.load(folder / "tokens.npy")).long()).logits
        np.save(folder / "logits.npy", logits.numpy())
        keys = {what: sorted(map(str, loading[f"{what}_keys"])) for what in LOADING}
        (folder / "loading.json").write_text(json.dumps(keys))


def chat(out):
    """Writes OUT/ids.json: of each of OUT/cases.json, its ids and the mask of what is learned."""
    results = []
    for case in json.loads((out / "cases.json").read_text()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(case["folder"])
        marked = re.search(r"{%-?\s*generation\b", tokenizer.get_chat_template()) is not None
        encoded = tokenizer.apply_chat_template(
            case["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
        )
        mask = encoded["assistant_masks"] if marked else None
        results.append({"ids": encoded["input_ids"], "mask": mask})
    (out / "ids.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    command, *paths = sys.argv[1:]
    {"make": make, "load": load, "chat": chat}[command](*map(pathlib.Path, paths))
