"""Layers with the same parameters that are faster for compiled bf16 on a GPU.

conf/config.yaml names them: model.rewrite=extras.kernels:rewrite. Without them:
    python train.py model.rewrite=null
"""

from extras.kernels.layers import rewrite as rewrite
