"""Programs compiled for GPUs that are not there."""

import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType

import jaxaccel.target
from pallas_kernels import target

pytestmark = pytest.mark.target

ASSETS = Path(__file__).parent / "assets"


def training_program(devices):
    """A loss and its gradient through layers of matmul and softmax, weights and batch sharded."""
    mesh = jax.make_mesh((1, 2), ("data", "fsdp"), (AxisType.Auto,) * 2, devices=devices)
    place = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))
    weights = jax.ShapeDtypeStruct((3, 256, 256), jnp.float32, sharding=place(None, "fsdp"))
    x = jax.ShapeDtypeStruct((6, 192, 256), jnp.bfloat16, sharding=place(("data", "fsdp")))

    def layer(x_BTD, w_DD):
        h_BTD = jax.nn.silu(x_BTD @ w_DD.astype(jnp.bfloat16))
        scores_BTS = jnp.einsum("btd,bsd->bts", h_BTD, x_BTD).astype(jnp.float32)
        p_BTS = jax.nn.softmax(scores_BTS, axis=-1).astype(jnp.bfloat16)
        return x_BTD + jnp.einsum("bts,bsd->btd", p_BTS, h_BTD), None

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    step = jax.jit(jax.value_and_grad(loss), out_shardings=(place(), weights.sharding))
    return step, (weights, x)


def canonical(program):
    """HLO without source lines, and with names numbered in the order in which they appear.

    XLA numbers names by all that it tried on the way, not by what it made.
    """
    text = re.sub(r", metadata=\{[^}]*\}", "", program.as_text())
    text = re.sub(r"\nFileNames.*?\n\n(?=[%E])", "\n", text, flags=re.DOTALL)
    ours = {*re.findall(r"%([\w.\-]+)", text), *re.findall(r"([\w.\-]+): \w+\[", text)}
    numbers = {}
    number = lambda word: numbers.setdefault(word, f"v{len(numbers)}") if word in ours else word
    return re.sub(r"[A-Za-z_][\w.\-]*", lambda match: number(match.group()), text)


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_our_description_and_xlas_own_compile_to_the_same_program(name):
    here = target.parse(f"{name}x2")
    step, arguments = training_program(here.devices())
    ours = here.compile(step, *arguments)
    reference = topologies.get_topology_desc(
        platform="cuda", target_config=(ASSETS / f"{name}.txtpb").read_text(), topology="1x1x2"
    )
    step, arguments = training_program(reference.devices)
    theirs = step.trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    assert canonical(ours) == canonical(theirs)
    assert "all-gather" in ours.as_text() and "gemm" in ours.as_text()
    assert str(ours.memory_analysis()) == str(theirs.memory_analysis())


def fields(description):
    """Field names and values of a description in protobuf's text format, without rates."""
    flat = re.sub(r"\n  \w+_unit_description \{.*?\n  \}", "", description, flags=re.DOTALL)
    return dict(re.findall(r"(\w+): (\"[^\"]*\"|\S+)", flat))


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_our_description_has_the_figures_of_xlas_own(name):
    """A small program does not depend on each of them; a large one may."""
    ours = fields(target.describe(target.GPUS[name]))
    theirs = fields((ASSETS / f"{name}.txtpb").read_text())
    both = set(ours) & set(theirs)
    assert len(both) > 25
    differ = {field for field in both if ours[field] != theirs[field]}
    # Versions of libraries, the link to the host, and what gpus.py says of the H200.
    versions = {"runtime_version", "compile_time_toolkit_version", "driver_version", "dnn_version"}
    h200 = {"name", "device_description_str", "device_memory_size"} if name == "h200" else set()
    assert differ <= versions | h200 | {"pcie_bandwidth"}


def test_mesh_has_the_targets_devices_in_order():
    here = target.parse("h100x2x8")
    mesh = here.mesh({"data": 2, "fsdp": 4, "tensor": 2})
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert list(mesh.devices.flat) == list(here.devices())
    assert mesh == here.mesh({"data": 2, "fsdp": 4, "tensor": 2})
    # The outermost axis is the one that crosses nodes.
    nodes = [{device.process_index for device in half.flat} for half in mesh.devices]
    assert nodes == [{0}, {1}]
    assert target.find(mesh.devices.flat[0].device_kind) is here.gpu


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"data": 2, "fsdp": 8}, {}, {"fsdp": 0}])
def test_mesh_refuses_sizes_that_do_not_match(sizes):
    with pytest.raises(ValueError, match="target h200x8 has 8 GPUs"):
        target.parse("h200x8").mesh(sizes)


def test_one_gpu_needs_no_shardings_and_the_cpu_goes_on():
    step = jax.jit(lambda x, tree: jnp.tanh(x) @ tree["w"] + tree["b"])
    tree = {
        "w": jax.ShapeDtypeStruct((5, 7), jnp.float32),
        "b": jax.ShapeDtypeStruct((1, 1), jnp.float32),
    }
    compiled = jaxaccel.target.parse("a100").compile(
        step, jax.ShapeDtypeStruct((3, 5), jnp.float32), tree
    )
    assert compiled.memory_analysis().argument_size_in_bytes >= 4 * (15 + 35 + 1)
    ones = {"w": jnp.ones((5, 7)), "b": jnp.ones((1, 1))}
    result = step(jnp.zeros((3, 5)), ones)
    assert {device.platform for device in result.devices()} == {"cpu"}
    np.testing.assert_array_equal(result, np.ones((3, 7)))
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_a_program_for_other_devices_is_refused():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"compiled for .*cpu.* and not for h200x2"):
        target.parse("h200x2").compile(jax.jit(lambda x: x + 1), x)


def test_a_target_is_kept_out_of_the_persistent_cache(tmp_path):
    """Its entries cannot be read back: the second compilation would warn."""
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        x = jax.ShapeDtypeStruct((4, 6), jnp.float32)
        for _ in range(2):
            target.parse("h200").compile(jax.jit(lambda x: x * 3), x)
        assert list(tmp_path.iterdir()) == []
        jax.jit(lambda x: x * 3)(np.ones((4, 6), np.float32))
        assert list(tmp_path.iterdir()), "the cache does work for the CPU"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("jax_plugins.xla_cuda13", "jax-cuda13-pjrt"),
        ("jax_cuda13_plugin", "jax-cuda13-plugin"),
        ("nvidia.cu13", "nvidia-cuda-nvcc, nvidia-nvvm"),
    ],
)
def test_without_the_extra_one_line_says_what_to_install(monkeypatch, package, says):
    find_spec = target.importlib.util.find_spec
    hide = lambda name: None if name == package else find_spec(name)
    monkeypatch.setattr(target.importlib.util, "find_spec", hide)
    with pytest.raises(target.MissingExtra) as caught:
        target.parse("h200").devices()
    message = str(caught.value)
    assert (
        message
        == f"compiling for a GPU needs {says}: pip install -e '.[target]', or uv run --extra target"
    )


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_where_there_is_no_plugin_the_line_names_the_platform(monkeypatch, system, machine):
    monkeypatch.setattr(target, "sys", types.SimpleNamespace(platform=system))
    monkeypatch.setattr(target.platform, "machine", lambda: machine)
    with pytest.raises(target.MissingExtra, match=f"linux on x86_64.*{system} on {machine}"):
        target.parse("h200").mesh({"fsdp": 1})
