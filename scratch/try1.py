import os, sys, tempfile, pathlib, time, re
DUMP = tempfile.mkdtemp()
os.environ.update(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_TO=DUMP, MOSAIC_GPU_DUMP_PTXAS="1")
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
from jax.experimental.pallas import mosaic_gpu as plgpu
from pallas_kernels.attention import mosaic_backward as mb, xla, attention_reference
from pallas_kernels.attention.mask import *
from pallas_kernels.attention.xla import Options
from pallas_kernels import target, backend
MASK = Mask(causal=True)

def sim(T=128, S=128, H=2, K=1, D=64, E=64, dtype=jnp.bfloat16, mask=MASK, cap=None):
    ks = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(ks[0], (1, T, H, D), dtype); k = jax.random.normal(ks[1], (1, S, K, D), dtype)
    v = jax.random.normal(ks[2], (1, S, K, E), dtype); do = jax.random.normal(ks[3], (1, T, H, E), dtype)
    band, arrays = split(mask, 1, T, S)
    o = Options(band, D**-0.5, cap)
    out, lse = xla.forward(o, q, k, v, None, arrays)
    delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1)
    want = xla.backward(o, q, k, v, None, arrays, out, lse, do, jnp.zeros_like(lse))
    t = time.time()
    with backend.simulate():
        got = jax.jit(lambda *x: mb.backward(o, *x))(q, k, v, arrays, lse, delta, do)
        jax.block_until_ready(got)
    print("sim", time.time() - t, [float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()) for a, b in zip(got, want)])

def build(D, E, mask=MASK, cap=None, works=None, T=4096, seg=False, dt=jnp.bfloat16, H=4, K=2, verbose=False):
    s = lambda *x, dt=dt: jax.ShapeDtypeStruct(x, dt)
    band, arrays = split(mask, 1, T, T)
    if seg:
        i = s(1, T, dt=jnp.int32); arrays = MaskArrays(i, i, arrays.offset)
    o = Options(band, D**-0.5, cap)
    tgt = target.parse("h200")
    os.environ["CUDA_ROOT"] = str(target._cuda_root())
    for work, tiles in (works or mb.choose(D, E, soft_cap=cap is not None)).items():
        t = time.time()
        f = lambda q,k,v,d,m,l,e: mb.run(work, tiles, o, q,k,v,d,m,l,e)
        try:
            tgt.compile(jax.jit(f), s(1,T,H,D), s(1,T,K,D), s(1,T,K,E), s(1,T,H,E), arrays, s(1,T,H,dt=jnp.float32), s(1,T,H,dt=jnp.float32))
        except ValueError as e:
            print("fail", D, E, work.name, tiles, str(e)[:200]); continue
        for r in sorted(pathlib.Path(DUMP).glob("*.ptxas")):
            x = r.read_text(); r.unlink()
            if verbose: print(x)
            print(D, E, work.name, tiles, "spill", re.findall(r"(\d+) bytes spill stores", x), re.findall(r"Used (\d+) reg", x), [w for w in ("serialized",) if w in x], "%.1fs" % (time.time()-t), flush=True)

if __name__ == "__main__":
    if "sim" in sys.argv: sim()
    if "build" in sys.argv: build(128, 128)
    if "all" in sys.argv:
        for D, E in ((64,64),(128,128),(192,128),(192,192),(256,256)):
            build(D, E); build(D, E, mask=Mask(causal=True, window=(100,None)), cap=30.0, seg=True)
