"""The reference that the tests against transformers compare with is one they can fail by."""

import json
import shutil
import sys

import hf_fixtures
import numpy as np
import tokenizers
from hf_fixtures import FAMILIES, reference_fixture  # noqa: F401

PLAIN = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}"
    "{% else %}{{ message.content + ':' }}{% endif %}{% endfor %}"
)
MARKED = PLAIN.replace(
    "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
)


def test_python_with_torch(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXACCEL_TORCH_PYTHON", raising=False)
    monkeypatch.setattr(hf_fixtures, "REPO", tmp_path)
    found = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in found)
    assert hf_fixtures.torch_python() is None
    found += ["torch"]
    assert hf_fixtures.torch_python() is None
    found += ["transformers"]
    assert hf_fixtures.torch_python() == sys.executable
    python = tmp_path / ".torch/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert hf_fixtures.torch_python() == str(python)
    monkeypatch.setenv("JAXACCEL_TORCH_PYTHON", "/elsewhere/python")
    assert hf_fixtures.torch_python() == "/elsewhere/python"


def test_families(reference):
    assert sorted(path.stem for path in reference.root.glob("*.npz")) == sorted(FAMILIES)
    for family in FAMILIES:
        arrays = reference.arrays(family)
        shapes = {name: array.shape for name, array in arrays.items() if "/" not in name}
        assert shapes == {
            "tokens": (2, 24),
            "logits": (2, 24, 96),
            "loss": (),
            "greedy": (64,),
            "train_tokens": (10, 4, 24),
            "losses": (10,),
        }
        gradients = {name: array for name, array in arrays.items() if name.startswith("grad/")}
        tied = family in ("qwen2", "gemma2", "llama_tied")
        assert ("grad/lm_head.weight" in gradients) == (not tied)
        for name, gradient in gradients.items():
            assert np.abs(gradient).max() > 1e-3, name


def test_load_lists_what_does_not_fit(reference, tmp_path):
    tokens = reference.arrays("llama_tied")["tokens"]
    whole, other = (
        shutil.copytree(reference.folder("llama_tied"), tmp_path / name)
        for name in ("whole", "other")
    )
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    (logits, loading), (_, other_loading) = reference.load([(whole, tokens), (other, tokens)])
    np.testing.assert_array_equal(logits, reference.arrays("llama_tied")["logits"])
    assert loading == {"missing": [], "unexpected": [], "mismatched": []}
    assert other_loading == loading | {
        "missing": [
            f"model.layers.{layer}.self_attn.{name}_proj.bias" for layer in (0, 1) for name in "kqv"
        ]
    }


def test_chat(reference, tmp_path):
    letters = {"<unk>": 0, **{letter: 1 + i for i, letter in enumerate("abcde:")}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": r, "content": c} for r, c in zip(roles, ("ab", "c", "d", "eab"))]
    cases = []
    for name, template in (("marked", MARKED), ("plain", PLAIN)):
        folder = tmp_path / name
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        cases.append({"folder": folder, "messages": messages})
    marked, plain = reference.chat(cases, tmp_path)
    assert marked["ids"] == plain["ids"] == [1, 2, 6, 3, 4, 6, 5, 1, 2]
    assert marked["mask"] == [0, 0, 0, 1, 0, 0, 1, 1, 1]
    assert plain["mask"] is None
