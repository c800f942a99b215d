"""From image files to batches on the device.

`data` finds the images and makes one sample; `feed` makes batches on the device. `feed` imports
`data`, never the reverse. A batch passes, in this order:

1 feed/sampler; 2 data/dataset (index, listing, splits); 3 data/decode (region), data/augment;
4 feed/loader (worker, ring); 5 feed/prefetcher (batch_augment, clock). feed/feed connects them.
"""
