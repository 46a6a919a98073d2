"""The images: where they come from, how they are split, and which process sees which samples."""

from lockstep.data.loading import Images, ResumableBatches, ShardedBatches
from lockstep.data.mnist import MNISTDataModule, MNISTSampleDataModule, fetch

__all__ = ["Images", "MNISTDataModule", "MNISTSampleDataModule", "ResumableBatches", "ShardedBatches", "fetch"]
