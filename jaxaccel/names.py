"""The vocabulary of checkpoint names.

Every tensor of the model that is worth saving for the backward pass carries one of
these names. Rematerialisation policies choose by name and not by primitive: the stock
policies look for `dot_general` and see nothing of a Pallas kernel or a custom VJP,
a name is seen everywhere.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

# Outputs of matmuls: costly to repeat.
QUERY = "query"
KEY = "key"
VALUE = "value"
ATTENTION_OUTPUT = "attention_output"  # after the output projection
MLP_GATE = "mlp_gate"
MLP_UP = "mlp_up"
MLP_OUTPUT = "mlp_output"

# What attention keeps for its own backward pass; named by the op itself.
ATTENTION_CONTEXT = "attention_context"
ATTENTION_LSE = "attention_lse"

# Cheap to repeat: one pass over memory.
LAYER_INPUT = "layer_input"
ATTENTION_NORM = "attention_norm"
MLP_NORM = "mlp_norm"
MLP_ACTIVATION = "mlp_activation"
RMS_NORM_INVERSE = "rms_norm_inverse"  # 1/rms of every norm's rows; named by the op itself

# No tensor but a scope (`jax.named_scope`): matmuls in it are meant to be FP8. XLA may widen
# an operand and leave no trace of it; a matmul of this scope that is not FP8 was lost.
FP8_MATMUL = "fp8_matmul"

MATMULS = (QUERY, KEY, VALUE, ATTENTION_OUTPUT, MLP_GATE, MLP_UP, MLP_OUTPUT)
ATTENTION = (ATTENTION_CONTEXT, ATTENTION_LSE)
ELEMENTWISE = (LAYER_INPUT, ATTENTION_NORM, MLP_NORM, MLP_ACTIVATION, RMS_NORM_INVERSE)
ALL = (*MATMULS, *ATTENTION, *ELEMENTWISE)


def tag(x: PyTree[Array], name: str) -> PyTree[Array]:
    """Returns `x` under `name`, for rematerialisation policies to see.

    **Exactness**: the identity.

    Args:
      x: an array, or a tree of arrays.
      name: one of `names.ALL`.

    Returns:
      `x`, unchanged.

    Raises:
      ValueError: the name is not in the vocabulary. A misspelt name would be silently
        ignored by every policy.

    Example:
      >>> import jax.numpy as jnp
      >>> tag(jnp.ones(2), MLP_GATE).shape
      (2,)
    """
    if name not in ALL:
        raise ValueError(f"unknown checkpoint name {name!r}; known: {', '.join(ALL)}")
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), x)
