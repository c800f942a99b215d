"""Load image files as batches on the device.

`data` finds the images and loads one sample; `feed` assembles batches on the device. `feed` imports
`data`, never the reverse. The data flow of a batch, in this order:

1 feed/sampler; 2 data/dataset (index, listing, splits); 3 data/decode (region), data/augment;
4 feed/loader (worker, ring); 5 feed/prefetcher (batch_augment, clock). feed/feed connects them.
"""
