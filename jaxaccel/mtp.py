"""Heads for multi-token prediction: at each position, the tokens after the next one too.

A decoder's hidden state of position i predicts token i + 1. Head k of 1 .. N predicts token
i + 1 + k, with one layer of its own and the decoder's embedding and output head. In training
the heads ask the decoder to plan ahead; in decoding they draft what it then verifies
(`decode`). Two kinds:

  sequential   DeepSeek-V3 (arXiv:2412.19437, section 2.2). Head k reads the hidden state of head
               k - 1 (of the decoder, for k = 1) and the embedding of token i + k: both are
               normed, concatenated, projected to the width, and go through the layer. Each
               prediction is conditioned on the tokens before it, as in plain decoding.
  parallel     Gloeckle et al. (arXiv:2404.19737, section 2). Head k reads the decoder's hidden
               state alone. The heads are stacked and run as one batched computation: a step has
               as many matmuls for eight of them as for one.

What a head hands on is what the output head reads: after its own last norm, as the decoder's
hidden state is after `final_norm`. Peers disagree here (some hand on the state before that
norm); this way the first head may be applied to its own result, in the decoder's place. In the
concatenation the embedding comes first, as in DeepSeek-V3's checkpoints.

Where it pays: decoding that is bound by memory; data that is short against the model. Where it
does not: small models may lose a little of their main loss (arXiv:2404.19737, section 3), and a
head costs the FLOP of a layer and of the output head.

Shape suffixes: B batch, T positions, D width, N heads.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxaccel.decoder_config import DecoderConfig, MtpConfig, linear_shapes
from jaxaccel.layers import Between, Joint, Layer, Linear, Norm

PROJECTION = "mtp_projection"  # its name in `linear_shapes`


class Join(nnx.Module):
    """What a sequential head reads: norms of embedding and hidden state, and their projection."""

    def __init__(
        self,
        config: DecoderConfig,
        mtp: MtpConfig,
        *,
        rngs: nnx.Rngs,
        dot_general: Callable | Mapping[str, Callable],
        between: Between,
    ):
        norm = {"stack": mtp.depth, "norm": between.norm}
        self.embedding_norm = Norm(config.width, "embed", config, **norm)
        self.hidden_norm = Norm(config.width, "embed", config, **norm)
        shape = linear_shapes(config, mtp)[PROJECTION]
        per_name = isinstance(dot_general, Mapping)
        self.projection = Linear(
            shape,
            ("embed", None),
            stack=mtp.depth,
            bias=False,
            std=shape[0] ** -0.5,
            dot_general=dot_general[PROJECTION] if per_name else dot_general,
            rngs=rngs,
        )

    def __call__(self, hidden_BTD: Array, embedded_BTD: Array) -> Array:
        """Input of a head's layer.

        Args:
          hidden_BTD: of the head before, or of the decoder.
          embedded_BTD: embeddings of the tokens that those hidden states predict.

        Returns:
          [B, T, D].
        """
        both = [self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)]
        return self.projection(jnp.concatenate(both, axis=-1))


class Heads(nnx.Module):
    """The heads of a decoder, their parameters stacked: `mtp.depth` of them.

    Args:
      config: shape of the decoder; a head's layer sees as far as the last of its group.
      mtp: how many heads, at least 1, and of which kind.
      rngs, dot_general, attention, between, joint: as of `Decoder`; the projection's matmul is
        named `mtp_projection`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mtp: MtpConfig,
        *,
        rngs: nnx.Rngs,
        dot_general: Callable | Mapping[str, Callable],
        attention: Callable,
        between: Between,
        joint: Joint = Joint(),  # noqa: B008 (immutable)
    ):
        c, parts = config, {"rngs": rngs, "dot_general": dot_general, "between": between}
        self.join = Join(c, mtp, **parts) if mtp.kind == "sequential" else None
        self.layer = Layer(
            c, c.windows[-1], stack=mtp.depth, attention=attention, joint=joint, **parts
        )
        self.norm = Norm(c.width, "embed", c, stack=mtp.depth, norm=between.norm)
        self.mtp = mtp
        for parameter in jax.tree.leaves(self, is_leaf=lambda x: isinstance(x, nnx.Param)):
            if isinstance(parameter, nnx.Param):  # a stack of heads lies whole on each device
                parameter.set_metadata(axes=(None, *parameter.get_metadata("axes")[1:]))

    def __call__(
        self,
        hidden_BTD: Float[Array, "B T D"],
        embedded_BTD: Float[Array, "B T D"] | None,
        run: Callable[[Layer, Array], Array],
        scan: Callable,
    ) -> Float[Array, "N B T D"]:
        """Hidden states of every head, for whole rows.

        Args:
          hidden_BTD: the decoder's, after its last norm.
          embedded_BTD: the row's own tokens, embedded; parallel heads do not read it.
          run: calls a head's layer; a `jax.tree_util.Partial` if arrays come with it.
          scan: the decoder's loop over layers; what it recomputes of a layer, it does here.

        Returns:
          What the output head reads for token i + 1 + k at [k - 1, :, i].
        """

        def following(run, carry, head):
            hidden, embedded = carry
            embedded = jnp.pad(embedded[:, 1:], ((0, 0), (0, 1), (0, 0)))
            hidden = head.norm(run(head.layer, head.join(hidden, embedded)))
            return (hidden, embedded), hidden

        def beside(run, hidden, heads):
            # A copy for each: a custom VJP cannot share a batch's one input between its parts.
            copies = jnp.broadcast_to(hidden, (self.mtp.depth, *hidden.shape))
            return hidden, jax.vmap(lambda head, x: head.norm(run(head.layer, x)))(heads, copies)

        if self.mtp.kind == "sequential":
            return scan(Partial(following, run), (hidden_BTD, embedded_BTD), self)[1]
        # A loop of one step: the scan then serves as for a layer.
        return scan(Partial(beside, run), hidden_BTD, jax.tree.map(lambda x: x[None], self))[1][0]
