"""Which tensor of a released model is which parameter: one table, no code for any model.

Heads that predict further ahead are `mtp.K.…`, which transformers does not know; after the prefix
stand DeepSeek-V3's names (`enorm`, `hnorm`, `eh_proj`, `shared_head`) and those of a layer.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxaccel.nn import DecoderConfig, MtpConfig
from jaxaccel.train_step import abstract_decoder

OUTSIDE = {
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm.scale": "model.norm.weight",
}
LAYER = {
    "attention_norm.scale": "input_layernorm.weight",
    "query.kernel": "self_attn.q_proj.weight",
    "query.bias": "self_attn.q_proj.bias",
    "key.kernel": "self_attn.k_proj.weight",
    "key.bias": "self_attn.k_proj.bias",
    "value.kernel": "self_attn.v_proj.weight",
    "value.bias": "self_attn.v_proj.bias",
    "query_norm.scale": "self_attn.q_norm.weight",
    "key_norm.scale": "self_attn.k_norm.weight",
    "attention_output.kernel": "self_attn.o_proj.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "gate.kernel": "mlp.gate_proj.weight",
    "up.kernel": "mlp.up_proj.weight",
    "down.kernel": "mlp.down_proj.weight",
}
# With norms after a block as well, one name moves.
AROUND = {
    "post_attention_norm.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    "post_mlp_norm.scale": "post_feedforward_layernorm.weight",
}
HEAD = {
    "join.embedding_norm.scale": "enorm.weight",
    "join.hidden_norm.scale": "hnorm.weight",
    "join.projection.kernel": "eh_proj.weight",
    "norm.scale": "shared_head.norm.weight",
}
HEADS_PREFIX = "mtp."


def tensor_name(path: str, index: int, config: DecoderConfig) -> str:
    """What a parameter is called in the files.

    Args:
      path: of the parameter here, such as `layers.0.query.kernel`.
      index: in its stack, of layers or of heads; 0 where there is none.
      config: shape of the decoder.

    Example:
      >>> config = DecoderConfig(8, layers=4, width=8, heads=1, kv_heads=1, head_size=8,
      ...                        mlp_width=8, windows=(4, None))
      >>> tensor_name("layers.1.down.kernel", 1, config)
      'model.layers.3.mlp.down_proj.weight'
    """
    names = LAYER | (AROUND if config.post_norms else {})
    stack, _, rest = path.partition(".")
    if stack == "layers":
        member, _, rest = rest.partition(".")
        number = index * len(config.windows) + int(member)
        return f"model.layers.{number}.{names[rest]}"
    if stack == "heads":
        return f"{HEADS_PREFIX}{index}.{(HEAD | names)[rest.removeprefix('layer.')]}"
    return OUTSIDE[path]


class Parameter(NamedTuple):
    """A parameter here, and the tensors that it is made of."""

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]  # of each in its stack, or its own
    stacked: bool

    @property
    def one(self) -> tuple[int, ...]:
        """Shape of one of the tensors, as it is here."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def transposed(self) -> bool:
        """Whether it lies transposed in the files."""
        return self.path.endswith(".kernel")

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of one of the tensors in the files."""
        return self.one[::-1] if self.transposed else self.one


def parameters(config: DecoderConfig, mtp: MtpConfig) -> list[Parameter]:
    """All parameters of a decoder, in the order of its tree."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract(config, mtp)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        stacked = name.startswith(("layers.", "heads."))
        indices = range(leaf.shape[0]) if stacked else (0,)
        names = tuple(tensor_name(name, i, config) for i in indices)
        found.append(Parameter(name, leaf.shape, names, stacked))
    return found


def abstract(config: DecoderConfig, mtp: MtpConfig) -> dict[str, Any]:
    """A decoder's parameters as shapes, a nested dict."""
    return nnx.to_pure_dict(nnx.state(abstract_decoder(config, mtp=mtp)))
