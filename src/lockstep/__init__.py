"""One CNN on MNIST with a single device, DataParallel and DistributedDataParallel, side by side."""
