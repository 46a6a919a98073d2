"""Every waiting time of the launcher, in seconds, with what it bounds.

What ranks and nodes wait for each other is the user's to choose: `launch.timeout_sec`.
"""

MONITOR_INTERVAL_SEC = 0.1  # between two looks of the agent at its workers: delays the end of a job by as much
SETTLE_SEC = 2.0  # after a first failure, for the other workers to end by themselves: only then is the cause known
SETTLE_POLL_SEC = 0.02  # between two looks while workers end
STOP_SEC = 25.0  # of a healthy job, between SIGTERM and SIGKILL: ten steps and a checkpoint; schedulers give 30 s
SHUTDOWN_SEC = 10.0  # the same of a job that failed: its workers have nothing to do but to clean up
REPORTING_RANK_SEC = 10.0  # for the rank that prints an error to print it, before torchrun ends it with the others
STORE_POLL_SEC = 0.02  # between two checks whether another rank has finished `once_per_node`
CONNECT_MARGIN_SEC = 5.0  # beyond `launch.timeout_sec`, for a connection attempt to give up by itself
