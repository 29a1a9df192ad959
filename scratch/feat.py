from try1 import *
F = {"full": {}, "causal": dict(mask=Mask(causal=True)), "win": dict(mask=Mask(causal=True, window=(100,None))), "seg": dict(mask=Mask(), seg=True), "cap": dict(mask=Mask(), cap=30.0), "causal+seg": dict(mask=Mask(causal=True), seg=True),
 "all": dict(mask=Mask(causal=True, window=(100,None)), cap=30.0, seg=True)}
F["full"] = dict(mask=Mask())
for D, E, works in ((128,128,{mb.DQ: mb.Tiles(128,2), mb.DKV: mb.Tiles(64,4)}), (128,128,{mb.DQ: mb.Tiles(64,4)}), (64,64,{mb.DKV: mb.Tiles(64,4)}), (192,192,{mb.DQ: mb.Tiles(64,2), mb.DK: mb.Tiles(64,2),mb.DV: mb.Tiles(64,2)})):
    for name, f in F.items():
        print(name, end=" "); build(D, E, works=works, **f)
