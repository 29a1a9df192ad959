"""Writes a run as a model's folder: `python -m experiments.export --run DIR --to DIR`.

    python -m experiments.export --run runs/tiny --to tiny-model
    python -m experiments.export --run runs/tiny --to tiny-model --dtype bfloat16

The folder has Hugging Face's format: `AutoModelForCausalLM.from_pretrained` of transformers opens
it, and so do `experiments.train --init-from` and `experiments.generate --model`. Heads that predict
further ahead go along under `mtp.`, which transformers leaves out.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Literal

import tokenizers

from experiments import cli, hf, hf_config, pretrained
from experiments import tokenizer as tokenizer_program
from experiments.hf_config import Description
from experiments.manifest import write_json
from experiments.run import Run, load_run
from experiments.tokenizer import BOS, EOS, Tokenizer


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Write a run as a model's folder."""

    run: Path
    """Folder of a training run; its newest checkpoint is taken."""
    to: Path
    """The folder to write; it must not be there, or be empty."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the weights; auto: the precision that the run was computed in."""


def describe(run: Run, dtype: str) -> Description:
    """The shape of a run's decoder, and a `config.json` for it.

    That of the model which the run began with, if it began with one: what is not about the weights
    is kept. Else one is made.

    Raises:
      UserError: no architecture of transformers has such a decoder.
    """
    model, mtp, tokenizer = run.config.model, run.config.mtp, run.tokenizer
    content: dict[str, Any] = dict(pretrained.origin(run.folder) or {})
    if content and hf_config.parse(content).model == model:
        content.pop("quantization_config", None)
        content["dtype" if "dtype" in content else "torch_dtype"] = dtype
    else:
        content = hf_config.write(model, run.config.sequence, dtype)
    if run.config.data.tokenizer != pretrained.own_tokenizer(run.config):
        content |= {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    heads = {hf_config.HEADS: mtp.depth, hf_config.HEADS_KIND: mtp.kind}
    content = {key: value for key, value in content.items() if key not in heads}
    return hf_config.parse(content | heads if mtp.depth else content)


def byte_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer `bytes` in the form of a `tokenizer.json`: the same ids for the same text."""
    # A byte-level BPE without merges; `bytes` has the order of bytes, this alphabet has its own.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    of = {byte: chr(byte) for byte in printable}
    of |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    model = tokenizers.models.BPE({of[byte]: byte for byte in range(256)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    names = [BOS, EOS]
    made.add_special_tokens(names)
    assert [made.token_to_id(name) for name in names] == [tokenizer.bos, tokenizer.eos]
    return made


def tokenizer_files(run: Run, context: int, folder: Path) -> dict[str, Path]:
    """The tokenizer's files, by name.

    Where a `tokenizer_config.json` is missing it is made, in `folder`, with a `tokenizer.json`
    that begins a text as it was begun in training.
    """
    bytes_only = run.config.data.tokenizer == "bytes"
    files = tokenizer_program.files("bytes" if bytes_only else str(run.folder))
    if "tokenizer_config.json" in files:
        return files
    if bytes_only:
        model = byte_tokenizer(run.tokenizer)
    else:
        model = tokenizers.Tokenizer.from_file(str(files["tokenizer.json"]))
    bos, eos = (
        i if i is None else model.id_to_token(i) for i in (run.tokenizer.bos, run.tokenizer.eos)
    )
    if bos is not None and run.tokenizer.bos not in model.encode("").ids:
        begin = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, run.tokenizer.bos)]
        )
        own = model.post_processor  # which does something else, say of offsets
        model.post_processor = tokenizers.processors.Sequence([own, begin]) if own else begin
    made = {name: folder / name for name in ("tokenizer.json", "tokenizer_config.json")}
    model.save(str(made["tokenizer.json"]))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bos is not None,
        "bos_token": bos,
        "eos_token": eos,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    write_json(made["tokenizer_config.json"], content)
    return files | made


def main(config: ExportConfig) -> None:
    """Writes `config.to` and says what it holds."""
    run = load_run(config.run)
    dtype = run.config.precision if config.dtype == "auto" else config.dtype
    description = describe(run, dtype)
    hf.check_free(config.to)
    with tempfile.TemporaryDirectory() as folder:
        files = tokenizer_files(run, description.context, Path(folder))
        hf.save(
            config.to,
            run.params(),
            description,
            dtype=dtype,
            companions=files,
        )
    architecture = description.content["architectures"][0]
    size = sum(path.stat().st_size for path in config.to.iterdir())
    print(f"{config.to}: {architecture}, {dtype}, {size:,} bytes")


if __name__ == "__main__":
    cli.run(main, ExportConfig)
