"""From a JPEG file to a batch on the device. The modules in the order of a batch's journey:

index -> sampler -> dataset (decode, augment) -> loader (worker, shared) -> feed ->
prefetcher (batch_augment).

Sub-packages: sizing (workers and memory), gpu_decode (the GPU's JPEG engines), synthetic (demo).
"""
