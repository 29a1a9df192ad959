"""Runs written as folders of models: what transformers makes of them, and what we do."""

import dataclasses
import json
import os
import subprocess

import jax
import numpy as np
import pytest
import tokenizers
from hf_fixtures import NO_TORCH, SCRIPT, torch_python
from hf_runs import MODEL, call, write_run
from test_chat import CHATML, LLAMA, MARKED, document, make, turns

from experiments import chat, export, generate, hf_config, safetensors
from experiments import tokenizer as tokenizer_module
from experiments.export import ExportConfig
from experiments.generate import GenerateConfig
from experiments.run import load_run
from jaxaccel.cache import logits
from jaxaccel.nn import MtpConfig

HEADS = MtpConfig(2, "sequential")
TEXTS = [
    "",
    "red green",
    "  def f(x):\n\treturn -x\n\n",
    "naïve… \N{SNOWMAN} 日本 😀",
    "e\u0301\r\n\0",
]
TOKENS = np.random.default_rng(0).integers(0, 258, (2, 30)).astype(np.int32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """By tokenizer: a run and the folder that it was exported to. One run has heads."""
    root, found = tmp_path_factory.mktemp("export"), {}
    bpe = root / "tokenizer.json"
    documents = [b"red green blue grows", "naïve…".encode()]
    tokenizer = tokenizer_module.train_bpe(iter(documents), 262)
    # As GPT-2 has it: it begins no text, and training does.
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    bpe.write_text(tokenizer.to_str())
    like_qwen = dataclasses.replace(MODEL, qk_norm=True, tied_head=True)
    for name, options in {
        "bytes": {},
        "bpe": {"tokenizer": bpe, "mtp": HEADS, "model": like_qwen},
    }.items():
        folders = write_run(root / f"{name}-run", **options), root / name
        assert call(export, ExportConfig, "--run", folders[0], "--to", folders[1]) == 0
        found[name] = folders
    return found


def weights(folder):
    return {name: x.read() for name, x in safetensors.open_folder(folder).items()}


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_what_lies_in_the_folder(exported, name):
    run, folder = exported[name]
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    found, trained = hf_config.read(folder), load_run(run)
    assert (found.model, found.mtp, found.context) == (trained.config.model, trained.config.mtp, 40)
    tokenizer = tokenizer_module.load(str(folder))
    ids = [found.content[key] for key in ("bos_token_id", "eos_token_id")]
    assert ids == [trained.tokenizer.bos, trained.tokenizer.eos] == [tokenizer.bos, tokenizer.eos]
    for text in TEXTS:
        assert (
            tokenizer.encode(text.encode()).tolist()
            == trained.tokenizer.encode(text.encode()).tolist()
        )


# --- as transformers has it -------------------------------------------------------------

# All at one start of Python; what the tests against transformers share does the work.
THEIRS = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import hf_reference, transformers
root, folders = pathlib.Path(sys.argv[2]), list(map(pathlib.Path, sys.argv[3:]))
transformers.utils.logging.disable_progress_bar()
hf_reference.load(*folders)
hf_reference.chat(root)
texts, found = json.loads((root / "texts.json").read_text()), {}
for folder in folders:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(texts)["input_ids"]
    found[folder.name] = ids, [tokenizer.decode(i, skip_special_tokens=True) for i in ids]
(root / "texts.json").write_text(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What transformers finds in the folders."""

    texts: dict  # by folder: ids, and what they decode to
    loading: dict  # by folder: lists of tensors' names
    logits: dict  # by folder: float32 [2, 30, V]
    chats: list  # of `CHATS`: ids, and mask


MERGES = [("h", "i"), ("Ġ", "y"), ("o", "u"), ("Ã", "©")]
TALKS = [
    turns("hi you", "yo hi"),
    turns("é😀", "e\u0301 you", "", " hi\n", system="S 日"),
]
CHATS = [(name, talk) for name in ("chatml", "llama", "marked") for talk in TALKS]
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "marked": MARKED}


@pytest.fixture(scope="module")
def talkers(tmp_path_factory):
    """By template: a folder of a tokenizer, and the tokenizer."""
    root = tmp_path_factory.mktemp("talkers")
    more = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        name: (root / name, make(root / name, template, MERGES, **more))
        for name, template in TEMPLATES.items()
    }


@pytest.fixture(scope="module")
def theirs(exported, talkers, tmp_path_factory):
    if torch_python() is None:
        pytest.skip(NO_TORCH)
    root = tmp_path_factory.mktemp("theirs")
    folders = {name: folder for name, (_, folder) in exported.items()}
    for folder in folders.values():
        np.save(folder / "tokens.npy", TOKENS)
    cases = [{"folder": str(talkers[name][0]), "messages": talk} for name, talk in CHATS]
    (root / "cases.json").write_text(json.dumps(cases))
    (root / "texts.json").write_text(json.dumps(TEXTS))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPYCACHEPREFIX", "PYTHONPATH")}
    done = subprocess.run(
        [torch_python(), "-c", THEIRS, SCRIPT.parent, root, *folders.values()],
        env=env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    read = lambda path: json.loads(path.read_text())
    found = Theirs(
        read(root / "texts.json"),
        {name: read(folder / "loading.json") for name, folder in folders.items()},
        {name: np.load(folder / "logits.npy") for name, folder in folders.items()},
        read(root / "ids.json"),
    )
    for folder in folders.values():  # as they were
        for name in ("tokens.npy", "logits.npy", "loading.json"):
            (folder / name).unlink()
    return found


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_transformers_computes_the_same_logits(exported, theirs, name):
    decoder = load_run(exported[name][0]).decoder()
    ours = np.asarray(jax.jit(lambda model, x: logits(model, model(x)))(decoder, TOKENS))
    assert np.abs(theirs.logits[name] - ours).max() < 5e-5 * np.abs(ours).max()
    assert np.abs(ours).std() > 0.1
    beside = [key for key in weights(exported[name][1]) if key.startswith("mtp.")]
    assert (len(beside) > 20) == (name == "bpe")
    lists = {"missing": [], "unexpected": sorted(beside), "mismatched": []}
    assert theirs.loading[name] == lists


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_transformers_makes_the_same_ids(exported, theirs, name):
    tokenizer = load_run(exported[name][0]).tokenizer
    ids, decoded = theirs.texts[name]
    assert ids == [generate.prompt_ids(tokenizer, text) for text in TEXTS]
    assert {i[0] for i in ids} == {tokenizer.bos}
    assert decoded == TEXTS


@pytest.mark.parametrize("case", range(len(CHATS)), ids=lambda i: f"{CHATS[i][0]}-{i % 2}")
def test_chats_are_those_of_transformers(talkers, theirs, case):
    name, talk = CHATS[case]
    found = chat.encode([document(talk)], talkers[name][1])[0]
    wanted = theirs.chats[case]
    assert found.ids.tolist() == wanted["ids"]
    assert 0 < found.counted.sum() < len(found.ids)
    assert (wanted["mask"] is not None) == (name == "marked")
    if wanted["mask"] is not None:
        assert found.counted.astype(int).tolist() == wanted["mask"]


# --- as we have it ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), [("bytes", ()), ("bpe", ("--speculative",))])
def test_the_model_continues_a_text_as_the_run_does(exported, capsys, name, how):
    run, folder = exported[name]
    args = ("--prompt", "naïve gr", "--max-new-tokens", 8, "--temperature", 0)
    assert call(generate, GenerateConfig, "--run", run, *args) == 0
    want = capsys.readouterr().out
    assert call(generate, GenerateConfig, "--model", folder, *args, *how) == 0
    found = capsys.readouterr()
    assert found.out == want and len(want) > len("naïve gr\n")
    assert ("drafts accepted by place" in found.err) == bool(how)


@pytest.mark.parametrize(
    ("precision", "asked", "dtype"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_weights_are_rounded_as_asked_for(exported, tmp_path, capsys, precision, asked, dtype):
    run, folder = exported["bytes"][0], tmp_path / "model"
    config = json.loads((run / "config.json").read_text()) | {"precision": precision}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    (tmp_path / "run/checkpoints").symlink_to(run / "checkpoints")
    options = ("--run", tmp_path / "run", "--to", folder, "--dtype", asked)
    assert call(export, ExportConfig, *options) == 0
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert capsys.readouterr().out == f"{folder}: LlamaForCausalLM, {dtype}, {size:,} bytes\n"
    assert hf_config.read(folder).content["torch_dtype"] == dtype
    whole = weights(exported["bytes"][1])
    for name, x in weights(folder).items():
        assert x.dtype.name == dtype
        np.testing.assert_array_equal(x, whole[name].astype(x.dtype))


# --- what is wrong ----------------------------------------------------------------------


def refused(capsys, *options):
    assert call(export, ExportConfig, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_nothing_is_written_over(exported, capsys):
    run, folder = exported["bytes"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    err = refused(capsys, "--run", run, "--to", folder)
    assert f"{folder} is there already, and not empty: choose another" in err
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_runs_that_cannot_be_exported(exported, tmp_path, capsys):
    to = tmp_path / "model"
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.json").write_text((exported["bytes"][0] / "config.json").read_text())
    assert "has no whole checkpoint yet" in refused(capsys, "--run", begun, "--to", to)
    assert "is no run folder" in refused(capsys, "--run", tmp_path / "none", "--to", to)
    err = refused(capsys, "--run", exported["bytes"][1], "--to", to)
    assert "is no run folder" in err and "--model" in err  # a model's folder
    odd = dataclasses.replace(MODEL, qk_norm=True, post_norms=True)
    run = write_run(tmp_path / "odd", model=odd)
    err = refused(capsys, "--run", run, "--to", to)
    assert "no architecture of transformers" in err and "qwen3 has another post_norms" in err
    assert not to.exists() and not list(tmp_path.glob("*.tmp"))
