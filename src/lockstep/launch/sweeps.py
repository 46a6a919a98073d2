"""What a sweep of hundreds of jobs needs of Hydra."""

from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class ForgetConfigs(Callback):
    """Lets go of a job's config when the job has ended.

    Hydra keeps every job's two configs until the sweep is over, a quarter of a MiB each time. They are in the job's
    folder.
    """

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        job_return.cfg = job_return.hydra_cfg = None
