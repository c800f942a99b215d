"""From image files to batches on the device. A batch passes, in this order:

1 sampler; 2 dataset (index, listing, splits); 3 decode (region), augment; 4 loader (worker,
shared); 5 prefetcher (batch_augment, clock). feed connects them; batch has the arrays that pass.
"""
