"""Layers with the same parameters that are faster for compiled bf16 on a GPU.

conf/config.yaml names them. Without them: `python train.py model.rewrite=null`.
"""

from extras.kernels.layers import rewrite as rewrite
