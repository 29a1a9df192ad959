"""`config.json` of released models, as a decoder's shape and back.

A family is what its architecture has built in, and what its `config.json` leaves out; the rest is
one table of names. Both styles are read: that of released models, and the one that transformers 5
writes (`rope_parameters`). Nothing is guessed: what a decoder here does not have is refused.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.errors import UserError, user_errors
from jaxaccel.nn import DecoderConfig, MtpConfig, RopeScaling


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture: its names, its built-in fields, and defaults of its `config.json`."""

    architecture: str
    model_type: str
    built_in: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `DecoderConfig`
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `config.json`
    divides: bool = False  # transformers insists that heads divide the width


_QWEN = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
FAMILIES = (
    Family("LlamaForCausalLM", "llama", {}, {"attention_bias": False, "mlp_bias": False}, True),
    Family("MistralForCausalLM", "mistral", {}, {"sliding_window": 4096}),
    Family("Qwen2ForCausalLM", "qwen2", {"qkv_bias": True}, _QWEN),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        {"qk_norm": True},
        {"head_dim": 128, "attention_bias": False, **_QWEN},
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        {"zero_centered_norm": True, "post_norms": True},
        {
            "head_dim": 256,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "layer_types": None,
            "attention_bias": False,
            "use_bidirectional_attention": False,
        },
        divides=True,
    ),
)

# Keys that mean the same in every family, by the field of `DecoderConfig`.
NUMBERS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_width": "intermediate_size",
}
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
LLAMA3_ROPE = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
# What a decoder here does not have, and the one value at which it is not needed.
ABSENT = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
}
# Heads that predict further ahead: DeepSeek's key for their number, and one of our own.
HEADS, HEADS_KIND = "num_nextn_predict_layers", "mtp_kind"
GEMMA = "query_pre_attn_scalar"  # a key that only Gemma's have


@dataclasses.dataclass(frozen=True)
class Description:
    """What a `config.json` says."""

    model: DecoderConfig
    context: int  # positions that the model was made for
    content: dict[str, Any]  # of the file
    mtp: MtpConfig = MtpConfig()  # heads that it says it has


class _Keys:
    """Values of one `config.json`, each checked when it is read."""

    def __init__(self, path: Path, content: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.path, self.content, self.defaults = path, content, defaults

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of that kind: the family's where the key is missing, `default` where null."""
        value = self.content.get(key, self.defaults.get(key))
        value = default if value is None else value
        if value is None:
            return None
        legal = (int, float) if kind is float else kind
        huge = isinstance(value, int) and value.bit_length() > 1000  # no float either
        if not isinstance(value, legal) or (isinstance(value, bool) and kind is not bool) or huge:
            words = {int: "a whole number", float: "a number", bool: "true or false"}
            need = words.get(kind, {str: "a text", list: "a list", dict: "an object"}.get(kind))
            raise UserError(f"{self.path}: {key} is {value!r}; it must be {need}")
        return float(value) if kind is float else value

    def need(self, key: str, kind: type, default: Any = None) -> Any:
        """As `get`, of a key that must be there."""
        value = self.get(key, kind, default)
        if value is None:
            raise UserError(f"{self.path} has no {key}")
        return value


def read(folder: str | Path) -> Description:
    """Reads the `config.json` of a model's folder, and nothing else.

    Args:
      folder: as `save_pretrained` writes it.

    Raises:
      UserError: there is no such file, or it describes what a decoder here cannot be.
    """
    path = Path(folder).expanduser() / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is no folder of a model: it has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    if "tokenizer_fingerprint" in content:
        raise UserError(
            f"{folder} is a run of this program, not a released model; this makes one of it: "
            f"python -m experiments.export --run {folder} --to FOLDER"
        )
    return parse(content, path)


def parse(content: Mapping[str, Any], path: Path = Path("config.json")) -> Description:
    """What the content of a `config.json` means; `path` is its name in errors.

    Raises:
      UserError: as `read`.
    """
    named = _Keys(path, content, {}).get("architectures", list) or [None]
    family = next(
        (f for f in FAMILIES if named[0] == f.architecture),
        next((f for f in FAMILIES if not named[0] and content.get("model_type") == f.model_type),
             None),
    )  # fmt: skip
    if family is None:
        known = ", ".join(f.architecture for f in FAMILIES)
        got = named[0] or content.get("model_type")
        raise UserError(f"{path}: architecture {got} is not supported; there are {known}")
    keys = _Keys(path, content, family.defaults)
    rope = keys.get("rope_parameters", dict, {}) or {}
    for key, neutral in ABSENT.items():
        value = rope.get(key, keys.get(key, type(neutral), neutral))
        if value != neutral:
            raise UserError(
                f"{path}: {key} is {value}, which decoders here do not have; legal is {neutral}"
            )
    method = (keys.get("quantization_config", dict) or {}).get("quant_method", "fp8")
    if method != "fp8":
        raise UserError(
            f"{path}: quant_method is {method!r}; legal is fp8 with a scale a block: take a "
            "folder that is not quantised"
        )
    heads = keys.need("num_attention_heads", int)
    defaults = {
        "head_dim": keys.need("hidden_size", int) // max(heads, 1),
        "num_key_value_heads": heads,
    }
    numbers = {
        field: keys.need(key, int, defaults.get(key)) for field, key in NUMBERS.items()
    }  # a family's own default comes first
    gemma: dict[str, Any] = {}
    if GEMMA in family.defaults:
        gemma = {
            "embedding_scale": math.sqrt(max(numbers["width"], 1)),
            "attention_scale": max(keys.need(GEMMA, int), 1) ** -0.5,
            "attention_soft_cap": keys.get("attn_logit_softcapping", float),
            "logits_soft_cap": keys.get("final_logit_softcapping", float),
        }
    with user_errors(f"{path}: "):
        model = DecoderConfig(
            **numbers,
            **family.built_in,
            **gemma,
            tied_head=keys.get("tie_word_embeddings", bool, False),
            activation=_activation(keys),
            norm_epsilon=keys.get("rms_norm_eps", float, 1e-6),
            rope_theta=_theta(keys, rope),
            rope_scaling=_rope_scaling(keys, rope),
            windows=_windows(keys, numbers["layers"]),
        )
        mtp = MtpConfig(keys.get(HEADS, int, 0), keys.get(HEADS_KIND, str, "sequential"))
    context = keys.need("max_position_embeddings", int)
    if context < 1:
        raise UserError(f"{path}: max_position_embeddings is {context}; it must be at least 1")
    return Description(model, context, dict(content), mtp)


def _activation(keys: _Keys) -> Any:
    key = "hidden_activation" if "hidden_activation" in keys.defaults else "hidden_act"
    name = keys.get(key, str, keys.defaults.get(key, "silu"))
    known = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    if name not in known:
        raise UserError(f"{keys.path}: {key} is {name!r}; legal are {', '.join(known)}")
    return known[name]


def _theta(keys: _Keys, rope: Mapping[str, Any]) -> float:
    default = keys.get("rope_theta", float, 10_000.0)
    found = _Keys(keys.path, rope, {}).get("rope_theta", float, default)
    if "rope_theta" in keys.content and found != default:
        raise UserError(
            f"{keys.path}: rope_theta is {default} there and {found} in rope_parameters"
        )
    return found


def _rope_scaling(keys: _Keys, rope: Mapping[str, Any]) -> RopeScaling | None:
    """Of `rope_parameters`, or of the older `rope_scaling`."""
    older = keys.get("rope_scaling", dict, {})
    if rope and older and {**rope, **older} != rope:
        raise UserError(f"{keys.path}: rope_scaling and rope_parameters are not the same")
    found = rope or older
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default" and not any(isinstance(value, dict) for value in found.values()):
        return None
    if kind != "llama3":
        raise UserError(f"{keys.path}: rope_type is {kind!r}; legal are default and llama3")
    nested = _Keys(keys.path, found, {})
    kinds = {"original_context": int}
    return RopeScaling(
        **{ours: nested.need(key, kinds.get(ours, float)) for ours, key in LLAMA3_ROPE.items()}
    )


def _windows(keys: _Keys, layers: int) -> tuple[int | None, ...]:
    """The shortest group of layers' windows that repeats."""
    window = keys.get("sliding_window", int)
    if "sliding_window" not in keys.defaults or keys.get("use_sliding_window", bool) is False:
        window = None
    kinds = keys.get("layer_types", list)
    if window is None or "layer_types" not in keys.defaults:
        only = "full_attention" if window is None else "sliding_attention"
        if any(kind != only for kind in kinds or ()):
            raise UserError(
                f"{keys.path}: layer_types contradicts sliding_window, {window}: legal is {only} "
                "for every layer"
            )
        return (window,)
    if kinds is None:  # Gemma alternates; Qwen's windows begin at a layer
        first = keys.get("max_window_layers", int)
        slides = (lambda i: i % 2 == 0) if first is None else (lambda i: i >= first)
        kinds = ["sliding_attention" if slides(i) else "full_attention" for i in range(layers)]
    known = {"sliding_attention": window, "full_attention": None}
    if unknown := [kind for kind in kinds if kind not in [*known]]:  # of any type
        raise UserError(
            f"{keys.path}: layer_types has {unknown[0]!r}; legal are {', '.join(known)}"
        )
    if len(kinds) != layers:
        raise UserError(f"{keys.path}: layer_types has {len(kinds)} entries for {layers} layers")
    each = tuple(known[kind] for kind in kinds)
    periods = (n for n in range(1, layers + 1) if layers % n == 0)
    return next((each[:n] for n in periods if each[:n] * (layers // n) == each), each)


def write(model: DecoderConfig, context: int, dtype: str) -> dict[str, Any]:
    """The content of a `config.json` that means this decoder, of the first family that can.

    Args:
      model: shape of the decoder.
      context: positions that it was trained for.
      dtype: of the weights: bfloat16, float16 or float32.

    Raises:
      UserError: no family has such a decoder; says what sets it apart.
    """
    apart: dict[str, list[str]] = {}
    for family in FAMILIES:
        content = _content(family, model, context, dtype)
        found = parse(content).model
        legal = not family.divides or model.width % model.heads == 0
        if found == model and legal:
            return content
        apart[family.model_type] = [
            field.name
            for field in dataclasses.fields(model)
            if getattr(found, field.name) != getattr(model, field.name)
        ] + ["width, of a multiple of heads"] * (not legal)
    reasons = "; ".join(f"{name} has another {', '.join(f)}" for name, f in apart.items())
    raise UserError(f"no architecture of transformers that is known here fits: {reasons}")


def _content(family: Family, model: DecoderConfig, context: int, dtype: str) -> dict[str, Any]:
    """The nearest that a family comes to a decoder."""
    c, has = model, family.defaults
    activation = "hidden_activation" if "hidden_activation" in has else "hidden_act"
    content = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(c, field) for field, key in NUMBERS.items()},
        "tie_word_embeddings": c.tied_head,
        activation: ACTIVATIONS[c.activation],
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": context,
        "torch_dtype": dtype,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if c.rope_scaling is not None:
        nested = {key: getattr(c.rope_scaling, ours) for ours, key in LLAMA3_ROPE.items()}
        content["rope_scaling"] = {"rope_type": "llama3", **nested}
    widths = [window for window in c.windows if window is not None]
    if "sliding_window" in has:
        content["sliding_window"] = widths[0] if widths else None
    if "use_sliding_window" in has:
        content["use_sliding_window"] = bool(widths)
    if "layer_types" in has:
        each = c.windows * (c.layers // len(c.windows))
        kinds = ["full_attention" if window is None else "sliding_attention" for window in each]
        content["layer_types"] = kinds
    if GEMMA in has:
        scale = c.head_size**-0.5 if c.attention_scale is None else c.attention_scale
        content |= {
            GEMMA: round(scale**-2),
            "attn_logit_softcapping": c.attention_soft_cap,
            "final_logit_softcapping": c.logits_soft_cap,
        }
    return content
