"""What the packages promise: documentation, light imports, few options."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import jaxaccel
import pallas_kernels

PACKAGES = (jaxaccel, pallas_kernels)
MODULES = sorted(
    info.name for p in PACKAGES for info in pkgutil.walk_packages(p.__path__, p.__name__ + ".")
)
# What a user takes into code of their own: documented in full.
IN_FULL = [
    "jaxaccel.accumulate", "jaxaccel.blockwise", "jaxaccel.fp8", "jaxaccel.fp8_delayed",
    "jaxaccel.overlap.ring_attention", "jaxaccel.overlap.zigzag",
    "jaxaccel.losses", "jaxaccel.names", "jaxaccel.numerics", "jaxaccel.optim",
    "jaxaccel.precision", "jaxaccel.remat", "jaxaccel.sharding", "jaxaccel.train_step",
    "pallas_kernels.attention.api", "pallas_kernels.codes",
    "pallas_kernels.cross_entropy.api", "pallas_kernels.rms_norm", "pallas_kernels.swiglu",
]  # fmt: skip


def public(name):
    """Public functions and classes that a module defines."""
    module = importlib.import_module(name)
    for key, thing in vars(module).items():
        own = getattr(thing, "__module__", None) == name and not key.startswith("_")
        if own and (inspect.isclass(thing) or inspect.isroutine(inspect.unwrap(thing))):
            yield key, thing


def test_the_modules_are_found():
    assert set(IN_FULL) <= set(MODULES)
    found = {key for key, _ in public("pallas_kernels.cross_entropy.api")}
    assert "linear_cross_entropy" in found
    assert "rms_norm" in {key for key, _ in public("pallas_kernels.rms_norm")}


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_a_docstring(name):
    module = importlib.import_module(name)
    assert module.__doc__, name
    for key, thing in public(name):
        assert thing.__doc__ and not thing.__doc__.startswith(f"{key}("), f"{name}.{key}"
        if inspect.isclass(thing):
            for method, function in vars(thing).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    assert function.__doc__, f"{name}.{key}.{method}"


@pytest.mark.parametrize("name", IN_FULL)
def test_functions_document_arguments_and_result(name):
    missing = []
    for key, thing in public(name):
        if inspect.isclass(thing) or key == "attention_reference":
            continue
        args, _, result = thing.__doc__.partition("Returns:")
        args = args.partition("Args:")[2]
        parameters = inspect.signature(thing).parameters
        missing += [
            f"{key}: {p}" for p in parameters if f"{p}:" not in args and f"{p}," not in args
        ]
        missing += [f"{key}: Returns"] * (not result.strip())
    assert not missing


@pytest.mark.parametrize("name", MODULES)
def test_public_functions_have_at_most_six_options(name):
    for key, thing in public(name):
        function = thing.__init__ if inspect.isclass(thing) else thing
        if inspect.isclass(thing) and hasattr(thing, "__dataclass_fields__"):
            continue
        options = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
        ]
        assert len(options) <= 6, f"{name}.{key}: {options}"


def python(code, *flags):
    subprocess.run([sys.executable, *flags, "-c", code], check=True, timeout=120)


def test_importing_touches_no_device_and_sets_nothing():
    python(f"""
import importlib, os
os.environ["JAX_PLATFORMS"] = "there_is_none"  # a device that is asked for is an error
import jax
before = dict(jax.config.values)
for name in {["experiments", *MODULES]}:
    importlib.import_module(name)
assert dict(jax.config.values) == before
try:
    jax.devices()
except RuntimeError:
    pass
else:
    raise AssertionError("the check cannot see a device being touched")
""")


def test_techniques_import_without_flax_and_optax():
    model = ("layers", "mtp", "nn", "cache", "speculate", "decode")
    step = ("train_step", "explicit", "stages", "tensor_parallel", "shards", "step_config")
    above = (*model, *step, "optim", "optim_8bit")
    without = [name for name in MODULES if name.removeprefix("jaxaccel.") not in above]
    assert "jaxaccel.losses" in without
    python(f"""
import importlib, sys
sys.modules["flax"] = sys.modules["optax"] = None
import jaxaccel
for name in {without}:
    importlib.import_module(name)
""")
