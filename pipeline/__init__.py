"""From a JPEG file to a batch on the device. The modules in the order of a batch's journey:

index -> sampler -> dataset (decode, augment) -> loader (worker, shared) -> prefetcher (batch_augment).
"""
