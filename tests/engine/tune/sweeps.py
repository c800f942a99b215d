"""Recorded sweeps over the number of workers, for the search."""

import re

# Sweeps on an H200 with 16 cores: images/s of the step alone and of the probe's worker; then for
# some numbers of workers: images/s with the step, share of waiting, images/s of the loader alone.
# The busy ones are measured in rounds, on a host with other load.
MEASURED = """
resnet18 plain: 21850 628
    6 3768 0.833 3862; 8 4819 0.784 4647; 10 6247 0.725 5751; 12 6921 0.689 6992;
    13 7290 0.658 7502; 14 8281 0.633 8091; 15 8121 0.617 8695
resnet18 shrunk: 21852 1579
    4 6563 0.706 6890; 6 10682 0.523 10603; 8 13806 0.396 12630; 10 17200 0.228 16056;
    12 18934 0.147 17860; 14 21045 0.013 20603; 15 21205 0.001 22094
resnet50 plain: 7156 686
    6 3832 0.494 3692; 8 4457 0.377 4811; 9 5364 0.279 5218; 10 5934 0.197 5803; 11 6535 0.097 6574;
    12 6919 0.064 6952; 14 7097 0.001 7082
resnet50 shrunk: 7190 1244
    2 3795 0.499 3508; 3 5424 0.263 5192; 4 6997 0.028 6697; 5 7182 0.004 8711; 6 7077 0 10005;
    8 7056 0 13692; 12 7089 0 19998
resnet50 shrunk again: 7443 1655
    3 4682 0.38 4393; 4 6050 0.18 6217; 5 7369 0.004 7686; 6 7367 0 9525; 7 7384 0 11612;
    8 7398 0 13336; 12 7363 0 18512
vit_s16 plain: 8122 768
    4 2937 0.64 3012; 6 4756 0.434 4310; 8 6343 0.249 5807; 10 6873 0.174 6816; 12 7955 0.018 8193;
    14 7951 0 8888; 15 8009 0 9486
vit_s16 shrunk: 8129 1781
    2 3735 0.551 3910; 3 5936 0.309 5407; 4 6927 0.142 6764; 5 8091 0.005 8710; 6 8089 0 11004;
    8 8089 0 13597; 12 7932 0 18845
resnet50 plain, busy: 7330 526
    10 4527 0.37 4479; 12 5200 0.297 5228; 13 5870 0.18 5492; 14 5680 0.202 5989;
    15 6420 0.114 5917
resnet18 plain, busy: 22128 533
    12 5352 0.727 5291; 13 5763 0.707 5896; 14 6446 0.689 6191; 15 7046 0.663 6809
resnet18 shrunk, busy: 18266 1239
    12 9972 0.426 9760; 13 10815 0.341 10370; 14 11763 0.324 11585; 15 11846 0.324 11663
vit_s16 plain, busy: 8253 563
    10 5115 0.389 4601; 12 6048 0.272 5352; 13 5375 0.328 5573; 14 6104 0.254 5952;
    15 7055 0.149 7494
vit_s16 shrunk, busy: 8254 1182
    4 4385 0.459 3971; 5 4807 0.412 5074; 6 6438 0.215 5866; 7 7202 0.133 6833; 8 8060 0.013 7871;
    9 8172 0.002 9030
"""


def sweeps() -> dict[str, tuple[float, float, dict[int, tuple[float, float, float]]]]:
    """Name -> images/s of the step and of a worker, and the cells by number of workers."""
    found = {}
    for block in re.split(r"\n(?=\S)", MEASURED.strip()):
        name, numbers = block.split(":")
        rates, _, rest = numbers.partition("\n")
        demand, probed = map(float, rates.split())
        rows = [[float(one) for one in row.split()] for row in rest.split(";")]
        found[name] = demand, probed, {int(n): (rate, wait, alone) for n, rate, wait, alone in rows}
    return found


SWEEPS = sweeps()
