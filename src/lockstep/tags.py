"""The names of everything that a run measures, declared once: written by the callbacks, read by the report.

Every tag is `stage/quantity`, with the unit at the end where there is one.
"""

TRAIN_LOSS = "train/loss"  # sample-weighted mean of the epoch over all ranks
TRAIN_LOSS_STEP = "train/loss_step"  # every `log_every_n_steps`: mean over all ranks, of the step's last batch
TRAIN_LOSS_RANK = "train/loss_rank_{rank}"  # one rank's own mean: what DDP alone would show
LR = "lr"  # of the step just taken
VAL_LOSS = "val/loss"
VAL_ACC = "val/acc"
TEST_LOSS = "test/loss"
TEST_ACC = "test/acc"
EPOCH_SEC = "time/epoch_sec"  # training only, slowest rank
EPOCH_SEC_FASTEST_RANK = "time/epoch_sec_fastest_rank"
EPOCH_SEC_MEDIAN = "time/epoch_sec_median"  # of the run's epochs, without the first where there are several
VAL_SEC = "time/val_sec"
STARTUP_SEC = "time/startup_sec"  # from the command's start to the first training batch
SAMPLES_PER_SEC = "throughput/samples_per_sec"  # global, of the epoch
SAMPLES_PER_SEC_MEDIAN = "throughput/samples_per_sec_median"
PHASE_SEC = "phase/{phase}_sec"  # mean per step over the ranks
PHASES = ("data", "forward", "backward", "optimizer")
ALL_REDUCE_SEC = "comm/all_reduce_sec"  # mean over the steps of the epoch that DDP samples, and over the ranks
OVERLAP_FRACTION = "comm/overlap_fraction"  # the share of it hidden behind the backward pass
SCATTER_SEC = "dp/scatter_sec"  # mean per step, inside forward and backward
REPLICATE_SEC = "dp/replicate_sec"
GATHER_SEC = "dp/gather_sec"
REDUCE_SEC = "dp/reduce_sec"
# What a strategy adds: inside which phase, and in words.
INNER_PHASES = {
    ALL_REDUCE_SEC: ("backward", "all-reduce"),
    SCATTER_SEC: ("forward", "scatter"),
    REPLICATE_SEC: ("forward", "replicate"),
    GATHER_SEC: ("forward", "gather"),
    REDUCE_SEC: ("backward", "summing gradients"),
}
INNER = (*INNER_PHASES, OVERLAP_FRACTION)
GIL_CONTENTION = "gil/contention_rank_{rank}"  # 0..1, how long a thread waits for the interpreter lock, as a share

# Not measured but noted, once: what a comparison needs to know of a run beside its config.
SOURCE = "data/source"
THREADS = "run/threads"  # intra-op threads of each replica
DEVICE = "run/device"
HARDWARE = "run/hardware"
VERSIONS = "run/versions"

# What HParams shows per run, and what a sweeper may optimise.
SUMMARY = (TEST_ACC, TRAIN_LOSS, EPOCH_SEC_MEDIAN, SAMPLES_PER_SEC_MEDIAN)
FINAL = (*SUMMARY, VAL_LOSS, VAL_ACC, TEST_LOSS, EPOCH_SEC, SAMPLES_PER_SEC, STARTUP_SEC)

# Beside the tags in a run's folder, where `StepTimeline` has recorded some steps.
TRACE_FILE = "trace.json"
