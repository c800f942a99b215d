"""From a JPEG file to a batch on the device. The modules in the order of the path of a batch:

index -> sampler -> dataset (decode, augment) -> loader (worker, shared) -> feed ->
prefetcher (gpu_augment, batch_augment).

Sub-packages: sizing (workers and memory), gpu_decode (the GPU's JPEG engines), synthetic (demo).
"""
