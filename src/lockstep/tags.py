"""The names of everything that a run measures, declared once. The callbacks write them, the report reads them.

Every tag is `stage/quantity`, with the unit, if there is one, at the end.
"""

TRAIN_LOSS = "train/loss"  # mean over all samples of the epoch, on all ranks
TRAIN_LOSS_STEP = "train/loss_step"  # every `log_every_n_steps`: mean over all ranks, for the last batch of the step
TRAIN_LOSS_RANK = "train/loss_rank_{rank}"  # mean over one rank's samples: what DDP alone would show
LR = "lr"  # of the step just taken
VAL_LOSS = "val/loss"
VAL_ACC = "val/acc"
TEST_LOSS = "test/loss"
TEST_ACC = "test/acc"
EPOCH_SEC = "time/epoch_sec"  # training only, slowest rank
EPOCH_SEC_FASTEST_RANK = "time/epoch_sec_fastest_rank"
EPOCH_SEC_MEDIAN = "time/epoch_sec_median"  # median over epochs; leaves out the first if there are several
VAL_SEC = "time/val_sec"
STARTUP_SEC = "time/startup_sec"  # from the command's start to the first training batch
SAMPLES_PER_SEC = "throughput/samples_per_sec"  # global, of the epoch
SAMPLES_PER_SEC_MEDIAN = "throughput/samples_per_sec_median"
PHASE_SEC = "phase/{phase}_sec"  # mean per step over the ranks
PHASES = ("data", "forward", "backward", "optimizer")
ALL_REDUCE_SEC = "comm/all_reduce_sec"  # mean over the ranks and over the steps that DDP times
OVERLAP_FRACTION = "comm/overlap_fraction"  # share of all-reduce time hidden behind the backward pass
SCATTER_SEC = "dp/scatter_sec"  # mean per step, like the next three; part of a phase
REPLICATE_SEC = "dp/replicate_sec"
GATHER_SEC = "dp/gather_sec"
REDUCE_SEC = "dp/reduce_sec"
# What a strategy adds to a step: the phase that contains it, and its name in words.
STRATEGY_OVERHEAD = {
    ALL_REDUCE_SEC: ("backward", "all-reduce"),
    SCATTER_SEC: ("forward", "scatter"),
    REPLICATE_SEC: ("forward", "replicate"),
    GATHER_SEC: ("forward", "gather"),
    REDUCE_SEC: ("backward", "summing gradients"),
}
PER_STRATEGY = (*STRATEGY_OVERHEAD, OVERLAP_FRACTION)
GIL_CONTENTION = "gil/contention_rank_{rank}"  # 0..1, share of time that a thread waits for the interpreter lock

# Provenance: recorded once, not measured. A comparison needs it beside the config.
SOURCE = "data/source"
THREADS = "run/threads"  # intra-op threads of each replica
DEVICE = "run/device"
HARDWARE = "run/hardware"
VERSIONS = "run/versions"

# What the HParams page shows for each run, then what a sweeper may optimise.
SUMMARY = (TEST_ACC, TRAIN_LOSS, EPOCH_SEC_MEDIAN, SAMPLES_PER_SEC_MEDIAN)
FINAL = (*SUMMARY, VAL_LOSS, VAL_ACC, TEST_LOSS, EPOCH_SEC, SAMPLES_PER_SEC, STARTUP_SEC)

# The steps that `StepTimeline` recorded, in the run's folder.
TRACE_FILE = "trace.json"
