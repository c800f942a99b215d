"""From a JPEG file to a batch on the device. The modules in the order of the path of a batch:

index -> sampler -> dataset (decode, augment) -> loader (worker, shared) -> feed ->
prefetcher (batch_augment).

Optional rooms: gpu (the GPU's JPEG engines and augmentation), demo (images that it draws).
"""
