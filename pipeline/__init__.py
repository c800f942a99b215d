"""From a JPEG file to a batch on the device. A batch passes, in this order:

1 sampler; 2 dataset (index, listing, splits); 3 decode (region), augment; 4 ring;
5 prefetcher (batch_augment, clock). feed connects them; batch has the arrays that pass.
"""
